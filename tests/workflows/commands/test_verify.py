from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.store.manifest import SlideRecord, merge_manifest
from tests.conftest import Hyfi
from tests.data.store.test_verify import make_slide


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    for name in ("a", "b"):
        make_slide(store, name)
    return store


def test_a_whole_store_is_said_to_be_whole(hyfi_here: Hyfi, store: Path) -> None:
    done = hyfi_here("verify", store, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["slides"] == 2 and told["faults"] == [] and told["bytes"] > 0
    assert (store / "verify.csv").read_text() == "slide_id,path,reason\n"


def test_faults_are_named_on_standard_error_and_in_a_file(hyfi_here: Hyfi, store: Path) -> None:
    (store / "b.zarr/0/c/0/0/0").write_bytes(b"")
    done = hyfi_here("verify", store, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout.splitlines()[-1])
    assert [(f["slide_id"], f["path"]) for f in told["faults"]] == [("b", str(store / "b.zarr/0/c/0/0/0"))]
    assert "failed: b:" in done.stderr and "0 bytes" in done.stderr and "Traceback" not in done.stderr
    assert "0 bytes" in (store / "verify.csv").read_text()
    one = hyfi_here("verify", store / "a.zarr")
    assert one.returncode == 0 and "1 slide, " in one.stdout


def test_slides_that_are_still_written_are_named(hyfi_here: Hyfi, store: Path) -> None:
    """An ingest that runs, or was killed, leaves slides under hidden names: a store that lacks them looked whole."""
    for name in ("c d", "a"):  # of `a`, a new version is written beside the old one
        (store / f".{name}.zarr.part-0123456789abcdef").mkdir()
    (store / ".failed.zarr.tmp-host-1").mkdir()
    for name, status in (("a", "done"), ("b", "done"), ("failed", "failed")):
        sizes = {"store_mpp": 1.0, "height_px": 9, "width_px": 9, "tissue_fraction": 0.5}
        SlideRecord(name, f"/slides/{name}.svs", status, **sizes).save(store)  # type: ignore[arg-type]
    merge_manifest(store)
    done = hyfi_here("verify", store, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["unfinished"] == ["c d"]
    for said in (done.stderr, hyfi_here("inspect", store).stdout):
        assert "not finished" in said and "stopped: c d; they are left out" in said


def test_what_is_no_store_is_a_wrong_request(hyfi_here: Hyfi, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        done = hyfi_here("verify", path)
        assert done.returncode == 2 and str(path) in done.stderr and not list(tmp_path.rglob("verify.csv"))


def test_a_store_of_failed_slides_alone_is_a_store(hyfi_here: Hyfi, tmp_path: Path) -> None:
    merge_manifest(tmp_path)
    done = hyfi_here("verify", tmp_path)
    assert done.returncode == 0 and "no slide is finished, so nothing was checked" in done.stderr
    assert "says why" not in done.stderr  # the manifest has no row, as if the disk was full at the first slide
    SlideRecord("a", "a.svs", "failed", reason="no mpp").save(tmp_path)
    assert "nothing was checked; manifest.csv says why" in hyfi_here("verify", tmp_path).stderr
