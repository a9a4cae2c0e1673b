"""Numbers of a CSV: what is missing, impossible, or only looks like a number is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.samples.numbers import load_numbers
from hyfi_core.errors import RequestError


def write(folder: Path, *values: str) -> Path:
    path = folder / "labels.csv"
    path.write_text("slide_id,age\n" + "".join(f'{"abcdefgh"[k]},"{value}"\n' for k, value in enumerate(values)))
    return path


def test_numbers_and_missing_ones(tmp_path: Path) -> None:
    labels = load_numbers(write(tmp_path, "61", "-2.5e1", "NA", ""), "age")
    assert [labels.of(item) for item in "abcd"] == [(61.0,), (-25.0,), None, None] and labels.classes == ()
    assert labels.text((61.5,)) == "61.5" and "2 numbers from -25 to 61" in labels.notes[-1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1,5", "'1,5' .line 3.*comma"),
        ("> 90", "bound"),
        ("50-60", "range"),
        ("61 years", "unit"),
        ("inf", "not finite"),
        ("1e999", "not a number"),
        ("old", "not a number"),
    ],
)
def test_other_values_are_named(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_numbers(write(tmp_path, "1", value), "age")


def test_two_numbers_of_one_slide_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "1", "2")
    path.write_text(path.read_text() + "a,3\n")
    with pytest.raises(RequestError, match=r"slide_id a has two values of age: 1.0 on line 2 and 3.0 on line 4"):
        load_numbers(path, "age")


def test_equal_numbers_are_labels_as_well(tmp_path: Path) -> None:
    """Only training needs different ones, see `workflows.tasks.regression`; a test set may have one slide."""
    labels = load_numbers(write(tmp_path, "1", "1", ""), "age")
    assert [labels.of(item) for item in "abc"] == [(1.0,), (1.0,), None]


def test_a_column_without_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load_numbers(write(tmp_path, "", "NA"), "age")
    assert str(caught.value) == f"{tmp_path / 'labels.csv'}: the column 'age' is empty for every slide"
