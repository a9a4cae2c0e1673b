"""Folds as an array of jobs: one job for each, with the command that a user would type."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from hyfi_core.errors import RequestError
from tests.workflows.archive import SPLITS, make_config
from workflows.commands import train_folds
from workflows.commands.launch import ScriptOptions, run_array
from workflows.cross_validation.fold_runs import FoldRuns
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
    assert run_array(words, None, ScriptOptions(Resources(), path=script)) == 0
    text = script.read_text()
    assert "#SBATCH --array=0,2\n" in text and 'run.steps=4 --fold-column repeat_1 --resume --folds "$SLURM' in text
    assert (tmp_path / "run/splits.csv").is_file()


def test_a_job_pools_again_if_another_has_finished_in_the_meantime(monkeypatch: pytest.MonkeyPatch) -> None:
    finished, pooled = {0}, []

    def pool_folds(folder: Path, runs_of: Mapping[int, FoldRuns], folds: int) -> Mapping[str, Any]:
        pooled.append([*runs_of])
        finished.add(2)
        return {"of": folds}

    monkeypatch.setattr(train_folds, "pool_folds", pool_folds)
    monkeypatch.setattr(train_folds, "run_fold", lambda runs, fold: 0)
    runs = MagicMock(spec=FoldRuns, table=Mock(folds=(0, 1, 2)), chosen=(0,), folder=Path())
    runs.is_trained.side_effect = runs.is_evaluated.side_effect = finished.__contains__
    runs.was_relabelled.return_value = False
    assert train_folds.run(runs, as_json=False) == 0
    assert pooled == [[0], [0, 2]]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--folds", "9"], "no fold 9"), ([], "--folds all"), (["--ranks", "2", "--folds", "all"], "--folds all")],
)
def test_what_is_no_fold_is_refused(tmp_path: Path, store: Path, words: list[str], said: str) -> None:
    config, script = config_of(tmp_path, store), tmp_path / "folds.sbatch"
    with pytest.raises(RequestError, match=said):
        run_array(
            ["train", str(config), "--fold-column=repeat_1", *words], None, ScriptOptions(Resources(), path=script)
        )
    assert not script.exists()
