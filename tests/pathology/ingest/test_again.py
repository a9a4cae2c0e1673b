from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.store.manifest import record_path
from data.store.slide_store import slide_path
from hyfi_core.errors import RequestError
from pathology.ingest.archive import IngestOptions
from tests.pathology.ingest.test_archive import run
from tests.pathology.tiffs import MakeSlide


def test_another_mpp_in_the_manifest_than_the_files_is_refused_afterwards(
    tmp_path: Path, make_slide: MakeSlide
) -> None:
    manifest, store = make_slide().with_name("m.csv"), tmp_path / "store"
    manifest.write_text("path,source_mpp\na.tiff,\n")
    run([manifest], store)
    manifest.write_text('path,source_mpp\na.tiff,"0,51"\n')
    assert run([manifest], store).skipped == ["a"]
    manifest.write_text("path,source_mpp\na.tiff,0.25\n")
    with pytest.raises(RequestError, match=r"source_mpp: 0\.5 → 0\.25"):
        run([manifest], store)


def test_a_finished_slide_is_not_skipped_if_another_mpp_is_forced(tmp_path: Path, make_slide: MakeSlide) -> None:
    """The slide kept the microns per pixel of its file, and the run said that it was finished."""
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    assert run([source], store, IngestOptions(mpp=0.5, slide_mpp=0.25)).skipped == ["a"]
    assert run([source], store, IngestOptions(mpp=0.5, slide_mpp=0.5, force_mpp=True)).skipped == ["a"]
    forced = IngestOptions(mpp=0.5, slide_mpp=0.25, force_mpp=True)
    with pytest.raises(RequestError, match=r"slide_mpp: 0\.5 → 0\.25"):
        run([source], store, forced)
    assert [record.source_mpp for record in run([source], store, forced, overwrite=True).done] == [0.25]
    assert run([source], store, forced).skipped == ["a"]


def test_a_slide_whose_record_is_lost_is_taken_only_with_unaltered_metadata(
    tmp_path: Path, make_slide: MakeSlide
) -> None:
    source, store = make_slide(), tmp_path / "store"
    run([source], store)
    metadata = slide_path(store, "a") / "zarr.json"
    whole = metadata.read_text()
    metadata.write_text(whole.replace('"bad_tiles": 0', '"bad_tiles": 7'))
    record_path(store, "a").unlink()
    assert [r.bad_tiles for r in run([source], store).done] == [0]
    assert json.loads(metadata.read_text())["attributes"]["hyfi"]["bad_tiles"] == 0
