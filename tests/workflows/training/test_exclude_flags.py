"""Slides with flags are left out of training and validation, and said."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data.samples.exclusion import SLIDE_FLAGS
from data.store.manifest import SlideRecord, merge_manifest, record_path
from hyfi_core.errors import RequestError
from pathology.pages import FLAG_MEANINGS
from tests.workflows.archive import make_config
from tests.workflows.runs import run_here
from workflows.config.load import load_config
from workflows.training.job import prepare

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture
def flagged(tmp_path: Path, store: Path) -> Path:
    """Return a store with flags of slides 1 (train) and 6 (val), and of 7 and 9, all of one class in val."""
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for number, flags in {1: ("pen", "blur"), 6: ("blur",), 7: ("truncated",), 9: ("truncated",)}.items():
        record = SlideRecord.load(record_path(copy, f"slide-{number:02d}"))
        replace(record, flags=flags).save(copy)
    merge_manifest(copy)
    return copy


def test_slides_with_flags_are_left_out_and_recorded(
    tmp_path: Path, flagged: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, flagged, data={"exclude_flags": ["blur"]}, run={"steps": 1})
    assert run_here(config) == 0
    assert "data.exclude_flags: 2 slides left out: slide-01 (blur), slide-06 (blur)" in capfd.readouterr().out
    with (tmp_path / "run" / "excluded.csv").open() as file:
        rows = [(row["slide_id"], row["split"], row["flags"]) for row in csv.DictReader(file)]
    assert rows == [("slide-01", "train", "blur"), ("slide-06", "val", "blur")]
    covered = (tmp_path / "run" / "coverage.csv").read_text()
    assert "slide-00" in covered and "slide-01" not in covered and "slide-06" not in covered
    model = json.loads((tmp_path / "run" / "checkpoints" / "latest" / "model.json").read_text())
    assert model["exclude_flags"] == ["blur"]


def test_what_would_be_empty_is_refused(tmp_path: Path, flagged: Path) -> None:
    config = make_config(tmp_path, flagged, data={"exclude_flags": ["truncated"]})
    expected = r"2 slides left out: slide-07 \(truncated\), slide-09 .*no slide of 'malignant' is left in 'val'"
    with pytest.raises(RequestError, match=expected):
        prepare(load_config(config, []))
    for number in (6, 8):
        record = SlideRecord.load(record_path(flagged, f"slide-{number:02d}"))
        replace(record, flags=("truncated",)).save(flagged)
    merge_manifest(flagged)
    with pytest.raises(RequestError, match="no slide is left in 'val'"):
        prepare(load_config(config, []))


def test_unknown_flags_are_refused_with_the_known_ones(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, data={"exclude_flags": ["blurry"]})
    with pytest.raises(RequestError, match=r"exclude_flags.*'blurry'.*blur, .*pen"):
        load_config(config, [])


def test_flags_of_slides_have_a_meaning() -> None:
    assert set(SLIDE_FLAGS) < set(FLAG_MEANINGS)
