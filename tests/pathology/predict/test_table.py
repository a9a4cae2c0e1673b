"""Several processes write one table of predictions."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from pathology.predict.table import DONE, FAILED, Prediction, PredictionTable


def statuses(folder: Path) -> dict[str, str]:
    with (folder / "predictions.csv").open(newline="") as file:
        return {row["slide_id"]: row["status"] for row in csv.DictReader(file)}


def table(folder: Path) -> PredictionTable:
    return PredictionTable(folder, ["a", "b"], with_spread=False)


def test_two_that_opened_an_empty_folder_lose_no_rows(tmp_path: Path) -> None:
    """Each wrote the table that it had read at its start, without the other's slides."""
    first, second = table(tmp_path), table(tmp_path)
    first.put(Prediction("one", "", "one.svs", FAILED, reason="empty"))
    second.put(Prediction("two", "", "two.svs", DONE, "a", (0.75, 0.25)))
    first.put(Prediction("three", "", "three.svs", DONE, "b", (0.25, 0.75)))
    assert statuses(tmp_path) == {"one": FAILED, "two": DONE, "three": DONE}
    second.put(Prediction("one", "", "one.svs", DONE, "a", (1.0, 0.0)))
    assert statuses(tmp_path) == {"one": DONE, "two": DONE, "three": DONE}
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]


def test_a_table_of_other_columns_is_left_alone(tmp_path: Path) -> None:
    opened = table(tmp_path)
    PredictionTable(tmp_path, ["c"], with_spread=False).put(Prediction("one", "", "one.svs", FAILED))
    with pytest.raises(RequestError, match="has the columns"):
        opened.put(Prediction("two", "", "two.svs", FAILED))
    assert statuses(tmp_path) == {"one": FAILED}
