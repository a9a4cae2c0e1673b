"""Labels that are about other slides than the store's end a run before it begins."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from data.store.manifest import load_manifest
from tests.workflows.archive import SPLITS, make_config
from tests.workflows.runs import run_here
from workflows.config.load import load_config
from workflows.training.job import mpp_of

pytestmark = pytest.mark.usefixtures("in_process")


def labels_csv(folder: Path, name: Callable[[int], str], more: tuple[str, ...] = ()) -> Path:
    path = folder / "labels.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "label", "split"))
        rows.writerows((name(k), ("benign", "malignant")[k % 2], split) for k, split in enumerate(SPLITS))
        rows.writerows((other, "benign", "train") for other in more)
    return path


def plain(number: int) -> str:
    return f"slide-{number:02d}"


def refusal(capfd: pytest.CaptureFixture[str], config: Path, *overrides: str) -> str:
    assert run_here(config, *overrides) == 2
    return capfd.readouterr().err


def test_a_row_without_a_slide_ends_the_run_unless_it_is_allowed(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = labels_csv(tmp_path, plain, ("elsewhere",))
    config = make_config(tmp_path, store, data={"labels": str(labels)}, run={"steps": 1})
    said = refusal(capfd, config)
    assert "1 labelled rows match no slide" in said and "  elsewhere\n" in said and "data.allow_unmatched=true" in said
    assert not (tmp_path / "run").exists()
    assert run_here(config, "data.allow_unmatched=true") == 0
    said = capfd.readouterr().out
    assert "slides with a label           12" in said and "rows that match no slide       1  elsewhere" in said


def test_names_with_a_suffix_are_those_of_the_store(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are the files that were ingested; names of another case are refused with the remedy."""
    labels = labels_csv(tmp_path, lambda k: f"{plain(k)}.SVS")
    config = make_config(tmp_path, store, data={"labels": str(labels), "allow_unmatched": True}, run={"steps": 1})
    text = labels.read_text()
    labels.write_text(text.replace("slide-00", "Slide-00"))
    assert "'Slide-00.SVS' (line 2): the store has 'slide-00', another ending" in refusal(capfd, config)
    labels.write_text(text)
    assert run_here(config) == 0
    said = capfd.readouterr().out
    assert "slides with a label           12" in said and "read 'slide-00.SVS' as 'slide-00'" in said


def test_a_split_of_a_slide_in_another_spelling_is_not_left_out(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    splits = tmp_path / "splits.csv"
    splits.write_text("slide_id,split\n" + "".join(f"{plain(k)},{name}\n" for k, name in enumerate(SPLITS)))
    config = make_config(tmp_path, store, data={"splits": str(splits)}, run={"steps": 1})
    splits.write_text(splits.read_text().replace("slide-00", "Slide-00").replace("slide-01,train\n", ""))
    assert "'Slide-00' (line 2): the store has 'slide-00', another case" in refusal(capfd, config)
    assert run_here(config, "data.merge_alike=true") == 0
    said = capfd.readouterr().out
    assert "5 slides to train on" in said and re.search(r"labelled slides in no split +1  slide-01\n", said)


def test_the_same_content_in_two_splits_ends_the_run(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, store, run={"steps": 1})
    rows = [{**row, "source_sha256": f"{number % 10:064x}"} for number, row in enumerate(load_manifest(store))]
    monkeypatch.setattr("workflows.training.job.load_manifest", lambda _: rows)
    said = refusal(capfd, config)
    assert "slide-00 (in train) and slide-10 (in test) have the same content" in said and "hyfi split --store" in said
    assert not (tmp_path / "run").exists()


def test_a_wrong_model_is_answered_before_the_tissue_is_looked_at(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = {"size_px": 64, "min_coverage": 0.99}
    model = {"name": "resnet6", "options": {"wings": 2}}
    assert "model.options.wings" in refusal(capfd, make_config(tmp_path, store, data=data, model=model))


def test_native_mpp_is_that_of_the_store_and_refused_where_slides_differ(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, store, data={"mpp": "native"}, run={"steps": 1})
    assert mpp_of(load_config(config, [])) == 1.0
    rows = load_manifest(store)
    monkeypatch.setattr("workflows.training.job.load_manifest", lambda _: [{**rows[0], "store_mpp": "0.5"}, *rows[1:]])
    said = refusal(capfd, config)
    assert "data.mpp: given native" in said and "from 0.5 (slide-00) to 1 (" in said


def test_missing_words_are_unlabelled_unless_the_run_says_otherwise(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = labels_csv(tmp_path, plain)
    lines = labels.read_text().splitlines()
    lines[1], lines[2] = "slide-00,unknown,train", "slide-01,N/A,train"
    labels.write_text("\n".join(lines))
    config = make_config(tmp_path, store, data={"labels": str(labels), "class_weights": "none"}, run={"steps": 1})
    assert run_here(config, "data.missing=[n/a]") == 0
    said = capfd.readouterr().out
    assert "5 slides to train on" in said and "classes benign, malignant, unknown" in said
    assert run_here(config, "run.steps=2", resume=True) == 2
    said = capfd.readouterr().err
    assert "the classes are benign, malignant; those of the run are benign, malignant, unknown" in said
    assert run_here(config, "run.dir=" + str(tmp_path / "other")) == 0
    said = capfd.readouterr().out
    assert "4 slides to train on" in said and "read as missing: 'unknown' 1, 'N/A' 1" in said
