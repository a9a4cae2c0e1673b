"""Grades of a CSV: their order is that of their numbers, or must be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.samples.grades import in_order
from data.samples.labels import Labels, load_labels
from hyfi_core.errors import RequestError


def write(folder: Path, *values: str) -> Path:
    path = folder / "labels.csv"
    path.write_text("slide_id,grade\n" + "".join(f"{'abcdefgh'[k]},{value}\n" for k, value in enumerate(values)))
    return path


def load_grades(path: Path, column: str, classes: tuple[str, ...] | None = None) -> Labels:
    return in_order(load_labels(path, column, classes=classes), str(path), is_given=classes is not None)


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (["3", "1", "2.0", "10", "2"], ("1", "2", "3", "10")),
        (["G2", "G1", "NA"], ("G1", "G2")),
        (["IV", "I", "III", "II"], ("I", "II", "III", "IV")),
        (["grade II", "grade I"], ("grade I", "grade II")),
        (["pT10", "pT2"], ("pT2", "pT10")),
        (["6", "3.5"], ("3.5", "6")),
    ],
)
def test_the_order_is_that_of_the_numbers(tmp_path: Path, values: list[str], order: tuple[str, ...]) -> None:
    labels = load_grades(write(tmp_path, *values), "grade")
    assert labels.classes == order and " < ".join(order) in labels.notes[-1]
    first = labels.of("a")
    assert isinstance(first, int) and order[first] == values[0]


def test_words_need_an_order(tmp_path: Path) -> None:
    path = write(tmp_path, "low", "high", "mid")
    with pytest.raises(RequestError, match=r"the order of high, low, mid is not known.*model.classes"):
        load_grades(path, "grade")
    labels = load_grades(path, "grade", classes=("low", "mid", "high"))
    assert [labels.of(item) for item in "abc"] == [0, 2, 1]
    with pytest.raises(RequestError, match="unknown class 'mid'"):
        load_grades(path, "grade", classes=("low", "high"))


def test_grades_of_two_kinds_have_no_order(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the order of G1, T2 is not known"):
        load_grades(write(tmp_path, "G1", "T2"), "grade")
