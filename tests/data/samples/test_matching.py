from __future__ import annotations

from pathlib import Path

import pytest

from data.samples.labels import Labels, load_labels
from data.samples.matching import LabelMatch, match_labels, plain_name
from hyfi_core.errors import RequestError

ROWS = [
    {"slide_id": "a-01", "case_id": "1", "status": "done"},
    {"slide_id": "a-02", "case_id": "1", "status": "done"},
    {"slide_id": "b-01", "case_id": "2", "status": "failed"},
    {"slide_id": "c-01", "case_id": "3", "status": "done"},
]


def labels_of(folder: Path, text: str) -> Labels:
    (folder / "labels.csv").write_text(text)
    return load_labels(folder / "labels.csv", "label")


def test_what_matched_and_what_did_not_is_counted(tmp_path: Path) -> None:
    labels = labels_of(tmp_path, "slide_id,label\na-01,benign\na-02,malignant\nb-01,benign\nz-09,benign\nz-10,\n")
    match = match_labels(ROWS, labels)
    assert dict(match.slides) == {"a-01": "benign", "a-02": "malignant"}
    unused = match_labels(ROWS, labels, {"a-01": "train"})
    assert unused.without_split == ("a-02",) and "  labelled slides in no split       1  a-02\n" in unused.describe()
    assert (match.failed, match.unlabelled, match.unmatched, match.similar) == (("b-01",), ("c-01",), ("z-09",), {})
    assert match.describe().splitlines() == [
        "labels:",
        "  slides with a label               2",
        "  slides without a label            1  c-01",
        "  rows that match no slide          1  z-09",
        "  labelled slides that failed       1  b-01",
        "  class benign                      1",
        "  class malignant                   1",
    ]
    (tmp_path / "few.csv").write_text("slide_id,label\na-01,benign\na-02,benign\n")
    few = match_labels(ROWS, load_labels(tmp_path / "few.csv", "label", classes=["benign", "malignant"]))
    assert few.describe().splitlines()[-1].split() == ["class", "malignant", "0"]


def test_rows_that_match_nothing_end_the_run_unless_they_are_allowed(tmp_path: Path) -> None:
    match = match_labels(ROWS, labels_of(tmp_path, "slide_id,label\na-01,benign\nz-09,malignant\n"))
    with pytest.raises(RequestError, match=r"1 labelled rows match no slide.*\n  z-09\n.*data\.allow_unmatched=true"):
        match.check("labels.csv", allow_unmatched=False)
    match.check("labels.csv", allow_unmatched=True)
    nothing = LabelMatch("slide_id", {}, ("x",), (), ("a-01",), ("z-09",), {})
    with pytest.raises(RequestError, match=r"no slide has a label: write each slide_id as .* are like 'a-01'") as told:
        nothing.check("labels.csv", allow_unmatched=False)
    assert "allow_unmatched" not in str(told.value)


@pytest.mark.parametrize("name", ["a-01.svs", "A-01", "scans/a-01.ome.tiff", r"C:\scans\a-01.ndpi", "a -01"])
def test_names_that_are_only_written_otherwise_are_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    match = match_labels(ROWS, labels_of(tmp_path, f"slide_id,label\na-02,benign\n{name},malignant\n"))
    for allowed in (False, True):
        with pytest.raises(RequestError, match=r"the store has 'a-01'\nwrite slide_id as in the store's manifest\.csv"):
            match.check("labels.csv", allowed)


def test_labels_by_case_match_the_cases_of_slides(tmp_path: Path) -> None:
    match = match_labels(ROWS, labels_of(tmp_path, "case_id,label\n1,benign\n3,malignant\n"))
    assert list(match.slides) == ["a-01", "a-02", "c-01"] and not match.unmatched
    match.check("labels.csv", allow_unmatched=False)


def test_many_rows_are_named_in_part(tmp_path: Path) -> None:
    rows = "".join(f"z-{k},{'xy'[k % 2]}\n" for k in range(30))
    with pytest.raises(RequestError, match="z-9\n  … and 20 more"):
        match_labels(ROWS, labels_of(tmp_path, f"slide_id,label\n{rows}")).check("labels.csv", False)


def test_a_dot_in_a_name_is_no_suffix() -> None:
    assert plain_name("TCGA-01.DX1") != plain_name("TCGA-01")


@pytest.mark.parametrize(
    ("other", "what"), [("Benign", "case"), ("ben ign", "white space"), ("benign\u200b", "invisible characters")]
)
def test_classes_that_only_look_different_are_refused_or_joined(tmp_path: Path, other: str, what: str) -> None:
    text = f"slide_id,label\na-01,benign\na-02,{other}\nc-01,{other}\n"
    with pytest.raises(
        RequestError, match=rf"'benign' \(line 2\) and '.*' \(line 3\) differ only in {what}\n.*join them"
    ):
        labels_of(tmp_path, text)
    labels = load_labels(tmp_path / "labels.csv", "label", merge_alike=True)
    assert labels.classes == (other,) and labels.indices == {"a-01": 0, "a-02": 0, "c-01": 0}
    assert labels.notes == (f"{tmp_path}/labels.csv: label: read 'benign' as {other!r}",)


def test_blanks_around_a_class_are_not_part_of_it(tmp_path: Path) -> None:
    labels = labels_of(tmp_path, "slide_id,label\na-01,benign\na-02,benign \nc-01,\tmalignant\u00a0\n")
    assert labels.classes == ("benign", "malignant")


def test_a_class_of_the_model_that_is_written_otherwise_is_named(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("slide_id,label\na-01,Benign\n")
    classes = ("benign", "malignant")
    with pytest.raises(RequestError, match=r"'Benign' \(line 2\): the model has 'benign', another case"):
        load_labels(tmp_path / "labels.csv", "label", classes=classes)
    assert load_labels(tmp_path / "labels.csv", "label", classes=classes, merge_alike=True).of("a-01") == 0


def test_slides_and_cases_of_the_store_keep_its_names(tmp_path: Path) -> None:
    rows = [*ROWS, {"slide_id": "C-01", "case_id": "", "status": "done"}]
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,case_id,label\nA-01.svs,01,x\nc-01,3.0,y\nC-01,,y\n")
    with pytest.raises(
        RequestError, match=r"slide_id: .*\n  'A-01.svs' \(line 2\): the store has 'a-01', another ending"
    ):
        load_labels(path, "label", rows=rows)
    labels = load_labels(path, "label", rows=rows, merge_alike=True)
    assert labels.indices == {"a-01": 0, "c-01": 1, "C-01": 1}
    assert labels.cases == {"a-01": "1", "c-01": "3"}
    match = match_labels(rows, labels)
    assert match.without_case == ("C-01",) and "C-01: each is a case of its own" in match.describe()
    path.write_text("slide_id,label\nc-01.svs,y\n")
    with pytest.raises(RequestError, match=r"'c-01.svs' may be 'c-01' or 'C-01' of the store"):
        load_labels(path, "label", rows=rows, merge_alike=True)


def test_a_name_with_the_ending_of_a_slide_file_is_the_stores(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("slide_id,label\na-01.svs,x\nc-01.ome.tiff,y\n")
    labels = load_labels(path, "label", rows=ROWS)
    assert labels.indices == {"a-01": 0, "c-01": 1}
    assert labels.notes == (f"{path}: slide_id: read 'a-01.svs' as 'a-01', 'c-01.ome.tiff' as 'c-01'",)
    path.write_text("slide_id,label\na-01.svs,x\na-01,y\n")
    with pytest.raises(RequestError, match="a-01"):  # one slide of two classes
        load_labels(path, "label", rows=ROWS)


def test_slides_with_the_same_content_are_named_with_their_classes(tmp_path: Path) -> None:
    rows = [{**row, "source_sha256": "00ff" if row["slide_id"] != "a-02" else "11ff"} for row in ROWS]
    match = match_labels(rows, labels_of(tmp_path, "slide_id,label\na-01,x\na-02,y\nb-01,x\nc-01,y\n"))
    assert match.describe().endswith("(source files that are equal byte by byte): a-01 (x), c-01 (y)")
