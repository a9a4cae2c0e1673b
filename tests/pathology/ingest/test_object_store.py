"""Ingest into a bucket: each slide once and whole, whatever ends in the middle."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import data
from data.location import files_below, location
from data.object_path import ObjectPath
from data.store.manifest import DONE, load_records
from data.store.verify import verify_store
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from pathology.ingest.archive import IngestOptions, IngestReport, Request, compare_with_store, ingest
from pathology.ingest.together import ingest_together
from tests.google_server import any_bucket, google, google_bucket
from tests.object_server import ObjectServer, bucket, server
from tests.pathology.tiffs import stained, write_slide

__all__ = ["any_bucket", "bucket", "google", "google_bucket", "server"]


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    folder = tmp_path / "slides"
    folder.mkdir()
    for k in range(3):
        write_slide(folder / f"{k}.tiff", stained(300, 300, k), mpp=0.5, compression="jpeg")
    return folder


def run(slides: Path, store: Path, **how: object) -> IngestReport:
    options = IngestOptions(mpp=0.5, cache=slides.parent / "cache")
    return ingest(Request([slides], store, options, **how), workers=1)  # type: ignore[arg-type]


def leftovers(slides: Path) -> list[str]:
    return files_below(slides.parent / "cache")


def test_a_bucket_becomes_a_store_and_a_second_run_has_nothing_to_do(slides: Path, any_bucket: str) -> None:
    store = location(f"{any_bucket}/archive/store")
    assert [record.status for record in run(slides, store).done] == [DONE] * 3
    assert data.slide_ids(str(store)) == ["0", "1", "2"] and verify_store(store, 2).faults == []
    assert data.open_store(str(store), "1").read(data.Box(0, 9, 0, 9)).shape == (3, 9, 9)
    assert {"manifest.csv", "contact.html"} <= set(files_below(store)) and not list((store / ".claims").glob("*"))
    again = run(slides, store)
    assert again.skipped == ["0", "1", "2"] and not again.done and not leftovers(slides)
    (store / "1.zarr/0/c/0/0/0").unlink()
    assert [record.slide_id for record in run(slides, store).done] == ["1"] and verify_store(store, 2).faults == []
    with pytest.raises(RequestError, match="other parameters"):
        compare_with_store(Request([slides], store, IngestOptions(mpp=1.0)))


def test_an_ingest_that_ends_in_the_middle_leaves_no_half_slide_and_is_continued(
    slides: Path, bucket: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = location(f"{bucket}/store")
    original = ObjectPath.write_bytes

    def breaks(self: ObjectPath, content: bytes) -> int:
        if str(self).endswith("1.zarr/labels/zarr.json"):
            raise KeyboardInterrupt
        return original(self, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ObjectPath, "write_bytes", breaks)
        run(slides, store)
    assert data.slide_ids(str(store)) == ["0"] and not (store / "1.zarr").exists()
    assert leftovers(slides), "the finished files wait for the next run"
    report = run(slides, store)
    assert [record.slide_id for record in report.done] == ["1", "2"] and report.skipped == ["0"]
    assert verify_store(store, 2).faults == [] and not leftovers(slides)


def test_what_an_interrupted_upload_left_is_removed_by_the_next_run(slides: Path, any_bucket: str) -> None:
    store = location(f"{any_bucket}/store")
    (store / "gone.zarr/0/c/0/0/0").write_bytes(b"half")
    (store / "claimed.zarr/0/c/0/0/0").write_bytes(b"being uploaded elsewhere")
    (store / ".claims/claimed").write_bytes(b"elsewhere/boot/1 77 123 0011")
    run(slides, store)
    assert not [name for name in files_below(store) if name.startswith("gone")]
    assert (store / "claimed.zarr/0/c/0/0/0").exists() and data.slide_ids(str(store)) == ["0", "1", "2"]


def test_two_runs_at_once_do_each_slide_once(slides: Path, any_bucket: str) -> None:
    store, reports = location(f"{any_bucket}/store"), []
    threads = [threading.Thread(target=lambda: reports.append(run(slides, store))) for _ in "12"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = sorted(record.slide_id for report in reports for record in report.done)
    assert done == ["0", "1", "2"] and verify_store(store, 2).faults == []
    assert data.slide_ids(str(store)) == ["0", "1", "2"] and not list((store / ".claims").glob("*"))


def test_ranks_deal_slides_through_the_bucket(slides: Path, any_bucket: str) -> None:
    store = location(f"{any_bucket}/store")
    request = Request([slides], store, IngestOptions(mpp=0.5, cache=slides.parent / "cache"))
    plan = compare_with_store(request)
    reports = run_ranks(2, lambda comm: ingest_together(request, plan if comm.rank == 0 else None, comm, workers=1))
    assert [sorted(record.slide_id for record in report.done) for report in reports] == [["0", "1", "2"]] * 2
    assert sorted(load_records(store)) == ["0", "1", "2"]
    assert not [name for name in files_below(store) if "dealt" in name]


def test_a_server_that_fails_stops_the_run_and_does_not_blame_slides(
    slides: Path, bucket: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.object_client._RETRIES", 1)
    store = location(f"s3://{server.make_bucket()}/store")
    server.fault = lambda number, method, path: "503" if "/0/c/" in path else ""
    report = run(slides, store)
    assert not report.done and not report.failed and "the server fails or does not answer" in report.stopped
    server.fault = lambda number, method, path: ""
    assert len(run(slides, store).done) == 3


def test_only_buckets_are_written(slides: Path, bucket: str, server: ObjectServer) -> None:
    with pytest.raises(RequestError, match="there is no bucket 'nowhere'"):
        run(slides, location("s3://nowhere/store"))
