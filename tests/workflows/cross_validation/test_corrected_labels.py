"""Labels that are corrected between two runs of ``hyfi train --folds``, for tasks with several columns."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.csv_table import read_table
from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config, make_store
from tests.workflows.cross_validation.test_folds import asked, commands, folds_of
from workflows.commands import train_folds
from workflows.cross_validation.fold_runs import FoldRuns
from workflows.launch.resumption import Resumption

__all__ = ["commands"]  # a fixture

COLUMNS = ("grade", "age", "months", "died", "dots", "striped")
OS = {"target": ["months", "died"], "task": "survival", "name": "os"}
TASKS: dict[str, dict[str, Any]] = {
    "survival": {"target": ["months", "died"], "task": "survival", "batch_size": 4},
    "multilabel": {"target": ["dots", "striped"], "task": "multilabel"},
    "several": {"targets": [{"target": "grade"}, {"target": "age", "task": "regression"}, OS], "batch_size": 4},
}
CORRECTED = {
    "survival": ({"died": "1"}, "3 (censored)", "3 (event)"),
    "multilabel": ({"striped": ""}, "none", "striped?"),
    "several": ({"age": ""}, "grade: low | age: 40 | os: 3 (censored)", "grade: low | os: 3 (censored)"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("archive"))


def write_labels(path: Path, **first: str) -> None:
    """Write the labels of all slides; ``first``: other cells of the first one."""
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, ("slide_id", *COLUMNS))
        rows.writeheader()
        for n in range(12):
            cells = (("low", "high")[n % 2], 40 + n, 3 + n, n % 2, n % 2, n // 6)
            row = dict(zip(COLUMNS, map(str, cells), strict=True)) | (first if n == 0 else {})
            rows.writerow({"slide_id": f"slide-{n:02d}", **row})


def labels_of(runs: FoldRuns) -> list[str]:
    """Return the label of the first slide in the table of all folds; empty if the slide is not in it."""
    rows = read_table(runs.folder / "predictions.csv", "predictions").rows
    return [row["label"] for row in rows if row["slide_id"] == "slide-00" and row["label"]]


@pytest.mark.parametrize("task", TASKS)
def test_folds_are_not_reported_with_former_labels(
    store: Path, tmp_path: Path, commands: list[list[str]], task: str
) -> None:
    table = tmp_path / "labels.csv"
    write_labels(table)
    data = {"splits": str(folds_of(store, tmp_path / "folds.csv")), "labels": str(table), "class_weights": "none"}
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    config = make_config(tmp_path, store, data=data | TASKS[task], model=model, run={"steps": 2})
    assert train_folds.run(asked(config, "all"), as_json=False) == 0
    runs = asked(config, "all", resume=True)
    cells, before, after = CORRECTED[task]
    assert labels_of(runs) == [before]
    write_labels(table, **cells)
    with pytest.raises(RequestError, match=r"fold 1: .*changed since it finished") as refused:
        train_folds.run(runs, as_json=False)
    assert f"relabelled (1): slide-00 (from {before} to {after})" in str(refused.value)
    accepted = replace(runs, resumption=Resumption(True, accepts_changes=True))
    validations = ["validate", str(runs.checkpoint_of(0))]
    for labels, cells_now in (([after], cells), ([], dict.fromkeys(COLUMNS, "")), ([before], {})):
        write_labels(table, **cells_now)
        done = len(commands)
        assert train_folds.run(replace(accepted), as_json=False) == 0
        assert [words[:2] for words in commands[done:]] == [validations]
        assert labels_of(runs) == labels
        summary = json.loads((runs.folder / "folds.json").read_text())
        assert summary["slides"] == 11 + len(labels)
        assert train_folds.run(replace(accepted), as_json=False) == 0
        assert len(commands) == done + 1  # once is enough
