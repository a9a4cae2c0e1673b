"""Times and events of a CSV: what is missing, impossible, or means something else is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.samples.survival_times import event_of, load_survival
from hyfi_core.errors import RequestError


def write(folder: Path, *rows: tuple[str, str]) -> Path:
    path = folder / "labels.csv"
    path.write_text("slide_id,days,died\n" + "".join(f"{'abcdefgh'[k]},{t},{e}\n" for k, (t, e) in enumerate(rows)))
    return path


def test_times_and_events(tmp_path: Path) -> None:
    path = write(tmp_path, ("10", "1"), ("0", "Alive"), ("3.5", "DECEASED"), ("NA", "0"), ("7", ""), ("", ""))
    labels = load_survival(path, "days", "died")
    assert [labels.of(item) for item in "abcdef"] == [(10.0, 1.0), (0.0, 0.0), (3.5, 1.0), None, None, None]
    assert "2 rows have (line 5, 6) only one of days and died: not used" in labels.notes[-2]
    assert "2 events of 3, at times up to 10" in labels.notes[-1]
    assert [event_of(text) for text in ("TRUE", "1.0", "1:DECEASED", "no", "0:LIVING", "2", "2.0")] == [
        *(1, 1, 1, 0, 0, None, None)
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("-3", "1"), "days: -3 .line 3.* not negative"),
        (("3", "2"), "died: '2' .line 3.*write 1 for an event.*1 and 2"),
        (("3", "relapse"), "died: 'relapse' .line 3"),
        (("soon", "1"), "days: 'soon' .line 3.*not a number"),
    ],
)
def test_impossible_values_are_named(tmp_path: Path, row: tuple[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_survival(write(tmp_path, ("1", "1"), row), "days", "died")


def test_the_first_lines_are_named(tmp_path: Path) -> None:
    for count, said in (
        (1, "1 row has (line 2) only"),
        (3, "3 rows have (line 2, 3, 4) only"),
        (4, "(line 2, 3, 4 …)"),
    ):
        labels = load_survival(write(tmp_path, *[("1", "")] * count, ("2", "1")), "days", "died")
        assert said in labels.notes[-2]


def test_times_of_a_test_set_may_teach_nothing(tmp_path: Path) -> None:
    """Only training needs events and different times, see `workflows.tasks.survival`."""
    labels = load_survival(write(tmp_path, ("2", "0"), ("2", "0")), "days", "died")
    assert [labels.of(item) for item in "ab"] == [(2.0, 0.0)] * 2 and labels.notes[-1] == "days, died: 0 events of 2"


def test_columns_that_are_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data.target is \[time, event\], in this order"):
        load_survival(write(tmp_path, ("1", "31"), ("0", "12"), ("1", "44")), "days", "died")
    for others in (("31", "12", "relapse"), ("31", "12", "1.2.3"), ("31", "12", "12")):  # no numbers, or as few as 1, 2
        with pytest.raises(RequestError) as told:
            load_survival(write(tmp_path, *(("1", value) for value in others)), "days", "died")
        assert "in this order" not in str(told.value)
    path = write(tmp_path, ("1", "1"), ("2", "0"))
    path.write_text(path.read_text() + "a,1,0\n")
    with pytest.raises(RequestError, match=r"slide_id a has two values of died: 1.0 on line 2 and 0.0 on line 4"):
        load_survival(path, "days", "died")
    path.write_text("slide_id,days,died\na,1,1\n,,0\n")
    with pytest.raises(RequestError, match=r"line 3: died 0.0, but no slide_id"):
        load_survival(path, "days", "died")


def test_times_and_events_of_different_slides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        load_survival(write(tmp_path, ("3", ""), ("", "1"), ("NA", "0")), "days", "died")
    assert str(caught.value) == f"{tmp_path / 'labels.csv'}: no slide has both 'days' and 'died'"
