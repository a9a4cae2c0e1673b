"""Several labels of a slide: columns of yes and no, or names in one cell; what is neither is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.samples.label_sets import label_set_text, load_label_sets, state_of
from hyfi_core.errors import RequestError


def write(folder: Path, head: str, *rows: str) -> Path:
    path = folder / "labels.csv"
    path.write_text(f"slide_id,{head}\n" + "".join(f"{'abcdefgh'[k]},{row}\n" for k, row in enumerate(rows)))
    return path


def test_columns_of_yes_and_no(tmp_path: Path) -> None:
    path = write(tmp_path, "TP53,KRAS", "1,no", "WT,Positive", "NA,1", ",")
    labels = load_label_sets(path, ["TP53", "KRAS"])
    assert labels.classes == ("TP53", "KRAS")
    assert [labels.of(item) for item in "abcd"] == [(1.0, 0.0), (0.0, 1.0), (-1.0, 1.0), None]
    assert [labels.text((1.0, 0.0)), labels.text((0.0, -1.0))] == ["TP53", "none"]
    assert "1 of 6 labels are unknown" in labels.notes[-1]
    assert label_set_text((1.0, -1.0), labels.classes) == "TP53;KRAS?"
    assert [state_of(text) for text in ("TRUE", "1.0", "mut", "neg", "0", "perhaps", "2.0", "00")] == [
        *(1, 1, 1, 0, 0, None, None, 0)
    ]


def test_names_in_one_cell(tmp_path: Path) -> None:
    path = write(tmp_path, "genes", "KRAS; TP53", "TP53", ";", "NA", "EGFR|KRAS")
    labels = load_label_sets(path, ["genes"])
    assert labels.classes == ("EGFR", "KRAS", "TP53")
    assert [labels.of(item) for item in "abcde"] == [(0, 1, 1), (0, 0, 1), (0, 0, 0), None, (1, 1, 0)]
    known = load_label_sets(path, ["genes"], classes=("TP53", "KRAS", "EGFR", "ALK"))
    assert known.of("a") == (1, 1, 0, 0)
    with pytest.raises(RequestError, match=r"unknown label 'EGFR' .line 6.; known: TP53, KRAS"):
        load_label_sets(path, ["genes"], classes=("TP53", "KRAS"))


@pytest.mark.parametrize(
    ("head", "rows", "message"),
    [
        ("x,y", ["1,0", "0,maybe", "1,1"], "y: 'maybe' .line 3.*write 1 or 0"),
        ("x,y", ["1,0", "1,1"], "x: the same for every slide"),
        ("x,y", ["1,", "0,NA"], "y: no slide has a value"),
        ("x,y", [",", ","], "no slide has a label"),
        ("x", ["a", "b"], "no cell has several labels.*data.task: multiclass"),
        ("x", ["1", "0"], "no cell has several labels.*name all columns of yes and no"),
        ("none,y", ["1,0", "0,1"], "a label .* is not none, which means none of the labels"),
        ("x", ["a;b", "B", "c"], "differ only in case"),
    ],
)
def test_other_values_are_named(tmp_path: Path, head: str, rows: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_label_sets(write(tmp_path, head, *rows), head.split(","))


def test_two_sets_of_one_slide_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "x,y", "1,0", "0,1")
    path.write_text(path.read_text() + "a,1,1\n")
    with pytest.raises(RequestError, match=r"slide_id a has two labels: x on line 2 and x;y on line 4"):
        load_label_sets(path, ["x", "y"])


def test_columns_that_are_not_the_known_labels_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "TP53,KRAS", "1,0", "0,1")
    assert load_label_sets(path, ["TP53", "KRAS"], classes=("KRAS", "TP53")).classes == ("TP53", "KRAS")
    with pytest.raises(RequestError) as caught:
        load_label_sets(path, ["TP53", "KRAS"], classes=("TP53", "EGFR"))
    assert str(caught.value) == f"{tmp_path / 'labels.csv'}: the columns are TP53, KRAS; the labels TP53, EGFR"
