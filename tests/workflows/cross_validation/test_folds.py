"""``hyfi train --folds`` on the small store; commands run in this process instead of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.csv_table import read_table
from data.samples.splits import load_splits
from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config, make_store
from tests.workflows.runs import in_this_process
from workflows import cli, signals
from workflows.commands import train_folds
from workflows.cross_validation.fold_runs import FoldRuns
from workflows.cross_validation.fold_table import FoldTable
from workflows.cross_validation.pooled import FoldResult, PooledFolds
from workflows.launch.resumption import Resumption


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("archive"))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch):
    """The commands that were run; a code in ``codes`` is returned instead of running that one."""
    ran: list[list[str]] = []

    def run_here(arguments: Sequence[object]) -> int:
        ran.append([str(word) for word in arguments])
        signals._requested = False
        return int(cli.app(ran[-1], standalone_mode=False) or 0)

    monkeypatch.setattr(train_folds, "run_command", run_here)
    with in_this_process(monkeypatch):
        yield ran


def folds_of(store: Path, out: Path, folds: int = 3) -> Path:
    rows = [f"slide-{n:02d},case-{n:02d},{n // 2 % folds}" for n in range(12)]
    out.write_text("\n".join(["slide_id,case_id,fold", *rows]))
    return out


def asked(config: Path, folds: str, resume: bool = False, **more: str) -> FoldRuns:
    return FoldRuns(config, tuple(f"{k}={v}" for k, v in more.items()), None, Resumption(resume), folds)


@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_every_slide_is_reported_by_a_model_that_neither_trained_nor_chose_with_it(
    store: Path, tmp_path: Path, commands: list[list[str]], capfd: pytest.CaptureFixture[str], task: str
) -> None:
    data = {"splits": str(folds_of(store, tmp_path / "folds.csv"))}
    if task == "regression":
        table = tmp_path / "numbers.csv"
        table.write_text("\n".join(["slide_id,months", *(f"slide-{n:02d},{10 + n % 5}" for n in range(12))]))
        data |= {"labels": str(table), "target": "months", "task": task, "class_weights": "none"}
    config = make_config(tmp_path, store, data=data, run={"steps": 2}, validation={"every_steps": 1})
    assert train_folds.run(asked(config, "all"), as_json=False) == 0
    run = tmp_path / "run"
    rows = read_table(run / "predictions.csv", "predictions").rows
    assert sorted(row["slide_id"] for row in rows) == [f"slide-{n:02d}" for n in range(12)]
    for fold in range(3):
        splits = load_splits(run / "splits.csv", column=f"fold_{fold}")
        parts = {part: {s for s, p in splits.items() if p == part} for part in ("train", "val", "test")}
        assert all(len(slides) == 4 for slides in parts.values())
        assert {row["slide_id"] for row in rows if row["fold"] == str(fold)} == parts["test"]
        own = read_table(run / f"fold-{fold}" / "test" / "predictions.csv", "predictions").rows
        assert {row["slide_id"]: row["prediction"] for row in own}.items() <= {
            row["slide_id"]: row["prediction"] for row in rows
        }.items()
    summary = json.loads((run / "folds.json").read_text())
    metric = {"multiclass": "accuracy", "regression": "mae"}[task]
    of_folds = [summary["folds"][fold][metric] for fold in "012"]
    assert summary["spread"][metric]["mean"] == pytest.approx(sum(of_folds) / 3)
    assert summary["cases"] == 12 and summary["pooled"][metric]["interval"] is not None
    # Of folds of equal size, either metric over all slides is the mean of the folds.
    assert summary["pooled"][metric]["value"] == pytest.approx(sum(of_folds) / 3, abs=1e-5)
    assert "Cross-validation: 3 of 3 folds" in (run / "index.html").read_text()
    assert "--checkpoint" in capfd.readouterr().out
    with pytest.raises(RequestError, match="this run exists"):
        train_folds.run(asked(config, "all"), as_json=False)
    before = len(commands)
    assert train_folds.run(asked(config, "all", resume=True), as_json=False) == 0
    assert len(commands) == before  # nothing was left to do
    (run / "fold-1/test/predictions.csv").unlink()
    assert train_folds.run(asked(config, "all", resume=True), as_json=False) == 0
    assert [words[0] for words in commands[before:]] == ["validate"]
    if task == "regression":
        _relabelled(asked(config, "all", resume=True), table, commands)


def _relabelled(runs: FoldRuns, table: Path, commands: list[list[str]]) -> None:
    """A corrected label is in no number of finished folds: it was kept in silence, with the models of both."""
    table.write_text(table.read_text().replace("slide-00,10", "slide-00,99"))
    said = r"fold 1: .* changed since it finished \(step 2\):\n  relabelled \(1\): slide-00 \(from 10 to 99\)\nRestore"
    with pytest.raises(RequestError, match=said):
        train_folds.run(runs, as_json=False)
    before = len(commands)
    accepted = replace(runs, resumption=Resumption(True, accepts_changes=True))
    # Fold 0, with its former label, was pooled with the others.
    assert train_folds.run(replace(accepted, folds="1"), as_json=False) == 0 and len(commands) == before
    assert json.loads((runs.folder / "folds.json").read_text())["slides"] == 8
    assert train_folds.run(accepted, as_json=False) == 0
    assert [words[:2] for words in commands[before:]] == [["validate", str(runs.checkpoint_of(0))]]
    rows = read_table(runs.folder / "predictions.csv", "predictions").rows
    assert {row["label"] for row in rows if row["slide_id"] == "slide-00"} == {"99"}


def test_a_fold_that_fails_ends_with_its_code(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, store, data={"splits": str(folds_of(store, tmp_path / "folds.csv"))})
    monkeypatch.setattr(train_folds, "run_command", lambda arguments: 1)
    assert train_folds.run(asked(config, "1,2"), as_json=False) == 1
    told = "fold 1 ended with exit code 1; once the cause is mended (optimizer.lr, run.on_nonfinite), the same command"
    assert told in capfd.readouterr().err
    monkeypatch.setattr(train_folds, "run_command", lambda arguments: 3)
    assert train_folds.run(asked(config, "1,2", resume=True), as_json=False) == 3
    assert "fold 1 ended with exit code 3; the same command with --resume" in capfd.readouterr().err


def test_wrong_requests_are_refused_before_anything_is_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds = folds_of(store, tmp_path / "folds.csv")
    config = make_config(tmp_path, store, data={"splits": str(folds)})

    def refused(text: str, match: str, **changes: str) -> None:
        with pytest.raises(RequestError, match=match):
            train_folds.run(asked(config, text, **changes), as_json=False)
        assert not (tmp_path / "run").exists()

    refused("0,7", r"--folds 0,7: no fold 7; .* has 0, 1, 2")
    refused("all", "no column 'fold'.*hyfi split LABELS.csv --folds 5", **{"data.splits": str(store / "manifest.csv")})
    two = folds_of(store, tmp_path / "two.csv", folds=2)
    refused("all", "2 folds; --folds needs at least 3", **{"data.splits": str(two)})
    text = folds.read_text()
    folds.write_text(text.replace("slide-02,case-02", "slide-02,case-00"))
    refused("0", r"case case-00 is in two splits: fold 0 \(slide slide-00\) and fold 1")
    folds.write_text(text)
    refused("all", "data.target|no column", **{"data.target": "grade"})
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    refused("all", "was started by a launcher")


@pytest.mark.parametrize(
    ("calibration", "differ"),
    [
        (None, False),
        ({"temperature": 2.0}, False),
        ({"thresholds": {}}, True),
        ({"targets": {"os": {"cutoff": 1}}}, True),
    ],
)
def test_the_page_says_that_each_fold_has_its_own_thresholds(calibration: Any, differ: bool) -> None:
    folds = PooledFolds([FoldResult(0, Path(), {"calibration": calibration}, {}, [])])
    assert ("thresholds that each fold" in folds.note) == differ


def test_rows_without_a_fold_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "folds.csv"
    path.write_text("slide_id,fold\na,0\nb,1\nc,2\nd,NA\n")
    table = FoldTable.read(path)
    assert [table.validating(fold) for fold in table.folds] == [1, 2, 0]
    assert table.splits().decode().splitlines()[-1].lstrip("\ufeff").startswith("d,,,,")
