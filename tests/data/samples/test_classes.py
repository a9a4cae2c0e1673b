"""Columns of classes as spreadsheets, pandas and R write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.missing import MISSING, is_missing
from data.samples.labels import Labels, load_labels
from data.samples.splits import load_splits
from hyfi_core.errors import RequestError


def labels_of(folder: Path, values: list[str], **how: object) -> Labels:
    path = folder / "labels.csv"
    path.write_text("slide_id,label\n" + "".join(f's{k},"{value}"\n' for k, value in enumerate(values)))
    return load_labels(path, "label", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", [*MISSING, "", "nan ", "N/a", "UNKNOWN", "[Not Available]", "<NA>", "'--", "\u2013"])
def test_missing_words_are_no_class(tmp_path: Path, word: str) -> None:
    labels = labels_of(tmp_path, ["a", word, "b"])
    assert labels.classes == ("a", "b") and labels.of("s1") is None
    if word:
        assert labels.notes == (
            f"{tmp_path}/labels.csv: label: read as missing: {word.strip().removeprefix(chr(39))!r} 1",
        )
    (tmp_path / "splits.csv").write_text(
        f'slide_id,case_id,split\ns0,"{word}",train\ns1,"{word}",test\ns2,c,"{word}"\n'
    )
    assert load_splits(tmp_path / "splits.csv") == {"s0": "train", "s1": "test"}


@pytest.mark.parametrize("word", ["NAD", "nano", "no", "0", "+", "negative", "null hypothesis", "none seen"])
def test_other_words_are_classes(word: str) -> None:
    assert not is_missing(word)


def test_the_words_can_be_chosen_and_listed_classes_are_classes(tmp_path: Path) -> None:
    values = ["none", "mild", "tbd", "-"]
    assert labels_of(tmp_path, values).classes == ("mild", "tbd")
    assert labels_of(tmp_path, values, missing=("TBD", "-")).classes == ("mild", "none")
    labels = labels_of(tmp_path, values[:2], classes=("none", "mild"))
    assert labels.of("s0") == 0 and not labels.notes


def test_a_minus_beside_a_plus_is_not_missing(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'-' is read as missing, but '\+' is a class"):
        labels_of(tmp_path, ["+", "-", "+"])
    assert labels_of(tmp_path, ["+", "-", "+"], missing=()).classes == ("+", "-")


def test_a_whole_number_is_one_class_however_many_zeros_follow_its_point(tmp_path: Path) -> None:
    labels = labels_of(tmp_path, ["0", "1.0", "0.0", "1", "nan"])
    assert labels.classes == ("0", "1") and [labels.of(f"s{k}") for k in range(5)] == [0, 1, 0, 1, None]
    assert labels_of(tmp_path, ["0.0", "1.0"]).classes == ("0.0", "1.0")
    assert labels_of(tmp_path, ["0", "1"], classes=("1.0", "0.0")).of("s0") == 1
    with pytest.raises(RequestError, match=r"'01' \(line 3\) and '1' \(line 2\) differ only in zeros"):
        labels_of(tmp_path, ["1", "01", "1", "2"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([f"{k * 1.7:.2f}" for k in range(8)], "8 different values for 8 rows.*data.task: regression.*bin them"),
        ([str(30 + k) for k in range(40)], "numbers, not classes"),
        ([f"slide {k}" for k in range(40)], "names, not classes; name the column"),
        (["TP53;KRAS", "TP53", "KRAS"], "'TP53;KRAS' has several classes.*data.task: multilabel"),
        (["a|b", "b|c", "c|a"], "multilabel"),
        (["a;b", "b", "c"], "'a;b' has several classes"),
    ],
)
def test_values_that_are_no_classes_are_refused(tmp_path: Path, values: list[str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        labels_of(tmp_path, values)
    assert len(labels_of(tmp_path, values, classes=tuple(values)).classes) == len(values)


@pytest.mark.parametrize(
    "values", [[str(k) for k in range(10)], ["adenoma; tubular", "carcinoma"], ["0.5", "1.5", "2.5"]]
)
def test_few_values_are_classes(tmp_path: Path, values: list[str]) -> None:
    assert set(labels_of(tmp_path, values).classes) == set(values)
