"""Folds as an array of jobs: one job for each, with the command that a user would type."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.workflows.archive import SPLITS, make_config
from workflows.commands.launch import ScriptOptions, run_array
from workflows.launch.scripts import Resources


def config_of(folder: Path, store: Path) -> Path:
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "label", "repeat_1"))
        rows.writerows((f"slide-{k:02d}", "ab"[k // 3 % 2], k % 3) for k in range(len(SPLITS)))
    return make_config(folder, store, data={"labels": str(folder / "labels.csv"), "class_weights": "none"})


def test_each_fold_is_a_job(tmp_path: Path, store: Path) -> None:
    config, script = config_of(tmp_path, store), tmp_path / "folds.sbatch"
    words = ["train", str(config), "run.steps=4", "--folds=0,2", "--fold-column", "repeat_1"]
    assert run_array(words, 4, ScriptOptions(Resources(), path=script)) == 0
    text = script.read_text()
    assert "#SBATCH --array=0,2\n" in text and 'run.steps=4 --fold-column repeat_1 --resume --folds "$SLURM' in text
    assert (tmp_path / "run/splits.csv").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--folds", "9"], "no fold 9"), ([], "--folds all"), (["--ranks", "2", "--folds", "all"], "--folds all")],
)
def test_what_is_no_fold_is_refused(tmp_path: Path, store: Path, words: list[str], said: str) -> None:
    config, script = config_of(tmp_path, store), tmp_path / "folds.sbatch"
    with pytest.raises(RequestError, match=said):
        run_array(["train", str(config), "--fold-column=repeat_1", *words], 4, ScriptOptions(Resources(), path=script))
    assert not script.exists()
