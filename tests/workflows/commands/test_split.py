from __future__ import annotations

import csv
import json
import random

import pytest

from data.csv_table import read_table
from data.samples.labels import load_labels
from data.samples.splits import load_splits
from hyfi_core.errors import RequestError
from workflows.commands.split import run


@pytest.fixture
def labels(tmp_path):
    """60 cases of one to three slides; one case in five is a tumour."""
    rng = random.Random(4)
    path = tmp_path / "labels.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide_id", "case_id", "label", "hospital"])
        for case in range(60):
            label = "tumour" if case % 5 == 0 else "normal"
            for slide in range(rng.randint(1, 3)):
                writer.writerow([f"s{case}-{slide}", f"c{case}", label, f"h{case % 9}"])
    return path


def rows_of(path):
    return read_table(path, "splits").rows


def test_splits_keep_cases_whole_and_classes_alike(labels, tmp_path):
    out = tmp_path / "new" / "splits.csv"
    assert run(labels, out, None, "case_id", "label", 0) == 0
    splits = load_splits(out)
    slides = load_labels(labels, "label")
    assert set(splits) == set(slides.indices)
    for split, share in (("train", 0.7), ("val", 0.15), ("test", 0.15)):
        inside = [slide for slide, part in splits.items() if part == split]
        tumours = sum(slides.of(slide) for slide in inside) / sum(slides.of(s) for s in splits)
        assert abs(len(inside) / len(splits) - share) < 0.04
        assert abs(tumours - share) < 0.08
    assert [p.name for p in out.parent.iterdir()] == ["splits.csv"]


def test_every_fold_has_a_column_in_which_it_validates(labels, tmp_path):
    out = tmp_path / "folds.csv"
    assert run(labels, out, 4, "case_id", "label", 0) == 0
    assert {row["fold"] for row in rows_of(out)} == set("0123")
    validated: list[str] = []
    for fold in range(4):
        by_column = load_splits(out, column=f"split_{fold}")
        folds = {row["slide_id"]: row["fold"] for row in rows_of(out)}
        assert by_column == {slide: "val" if number == str(fold) else "train" for slide, number in folds.items()}
        validated += [slide for slide, split in by_column.items() if split == "val"]
    assert sorted(validated) == sorted(row["slide_id"] for row in rows_of(out))


def test_other_groups_stay_whole(labels, tmp_path):
    out = tmp_path / "splits.csv"
    assert run(labels, out, 3, "hospital", None, 0) == 0
    folds: dict[str, set[str]] = {}
    for row in rows_of(out):
        folds.setdefault(row["hospital"], set()).add(row["fold"])
    assert len(folds) == 9 and all(len(of) == 1 for of in folds.values())


def test_the_seed_decides_and_nothing_else(labels, tmp_path):
    paths = [tmp_path / name for name in ("a.csv", "b.csv", "c.csv")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        run(labels, path, None, "case_id", None, seed)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()


def test_labels_by_case_and_by_slide_alone(tmp_path):
    for key in ("case_id", "slide_id"):
        path = tmp_path / f"{key}.csv"
        path.write_text(f"{key},label\n" + "".join(f"k{i},x\n" for i in range(10)))
        assert run(path, tmp_path / "out.csv", 5, "case_id", "label", 0) == 0
        rows = rows_of(tmp_path / "out.csv")
        assert [row[key] for row in rows] == [f"k{i}" for i in range(10)]
        assert sorted(row["fold"] for row in rows) == sorted("0123401234")


def test_one_json_object_comes_last(labels, tmp_path, capsys):
    run(labels, tmp_path / "splits.csv", None, "case_id", "label", 0, as_json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(part["groups"] for part in told["parts"].values()) == 60
    assert sum(part["classes"]["tumour"] for part in told["parts"].values()) > 12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((61, "case_id", None), "60 groups cannot fill 61 splits"),
        ((13, "case_id", "label"), "class 'tumour' is in 12 groups, which cannot fill 13 splits"),
        ((1, "case_id", None), "--folds: given 1"),
        ((None, "patient", None), "no column 'patient' .--group.*hospital"),
        ((None, "case_id", "grade"), "no column 'grade' .--stratify."),
        ((None, "slide_id", None), "case_id c.* is in two groups"),
    ],
)
def test_impossible_requests_write_nothing(labels, tmp_path, options, words):
    with pytest.raises(RequestError, match=words):
        run(labels, tmp_path / "out" / "splits.csv", *options, 0)
    assert not (tmp_path / "out").exists()


def test_an_unwritable_place_is_named(labels, tmp_path):
    with pytest.raises(RequestError, match=r"--out: cannot write .*labels.csv/splits.csv"):
        run(labels, labels / "splits.csv", None, "case_id", None, 0)
