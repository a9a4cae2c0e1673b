"""What a store takes beside its slides is said if it is many times as much."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from data.store.slide_store import SlideStore
from pathology.ingest.discover import SlideJob
from pathology.ingest.forecast import forecast, lower_bound_bytes, size_note
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.readers.facts.pictures import Pick
from pathology.readers.slide_source import SlideSource
from pathology.readers.sources import open_source
from tests.pathology.slides import write_slide
from tests.pathology.tiffs import stained


def test_a_store_many_times_its_slides_is_named_with_what_would_take_less(tmp_path: Path) -> None:
    rng, store = np.random.default_rng(0), tmp_path / "store"
    noise = rng.integers(0, 255, (64, 64, 3)).astype(np.uint8)
    large = np.kron(noise, np.ones((16, 16, 1), np.uint8))  # JPEG takes little of it, noise added later takes much
    path = write_slide(tmp_path / "one.tiff", large)
    assert ingest_slide(path, store, IngestOptions(mpp=0.5), {"source_path": str(path)}).status == "done"
    attributes = store / "one.zarr" / "zarr.json"
    text = attributes.read_text()
    assert size_note(store, [], IngestOptions()) == ""
    attributes.write_text(text.replace('"size_bytes": ', '"size_bytes": 1, "was": ', 1))
    note = size_note(store, ["one"], IngestOptions(mpp=0.5))
    assert "times their files" in note and "--codec jpeg:85 would take about" in note and "--lossless" in note
    stored, jpeg = (float(re.search(rf"{text} ([\d.]+) MB", note).group(1)) for text in ("take", "take about"))  # type: ignore[union-attr]
    assert jpeg == pytest.approx(stored / 7, abs=0.1) and "for files with JPEG tiles" in note
    assert size_note(store, ["one"], IngestOptions(mpp=0.5, lossless=True)) == ""
    assert size_note(store, ["other"], IngestOptions(mpp=0.5)) == ""


def test_files_of_glass_that_were_left_out_take_nothing(tmp_path: Path) -> None:
    store, image = tmp_path / "store", np.full((1024, 4096, 3), 245, np.uint8)
    image[:, :1024] = stained(1024, 1024)
    path, options = write_slide(tmp_path / "one.tiff", image), IngestOptions(mpp=0.5, glass="blank", sharded=False)
    assert ingest_slide(path, store, options, {"source_path": str(path)}).status == "done"
    shards = SlideStore.open(store / "one.zarr").attributes["shards"]
    assert any("size" not in entry for entry in shards.values())
    assert size_note(store, ["one"], options) == ""


@pytest.mark.parametrize("secret", ["", "00"])
def test_a_reader_that_fails_unforeseen_does_not_end_an_ingest_before_its_first_slide(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_slide(tmp_path / "good.tiff", stained(256, 256))

    def opened(path: Path, pick: Pick) -> SlideSource:
        if path != good:
            raise ZeroDivisionError(f"in {path.name}")
        return open_source(path, pick)

    monkeypatch.setattr("pathology.ingest.forecast.open_source", opened)
    jobs = [SlideJob(tmp_path / "bad.tiff", "bad", secret=secret), SlideJob(good, "good")]
    made = forecast(jobs, IngestOptions(mpp=0.5))
    assert made.slides == 1 and lower_bound_bytes(jobs, IngestOptions(mpp=0.5)) > 0
    # With pseudonyms, a message may not quote the file.
    assert made.refused == [(jobs[0], "ZeroDivisionError" if secret else "ZeroDivisionError: in bad.tiff")]
