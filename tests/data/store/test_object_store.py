"""A store on object storage: the same pixels and the same errors as in a folder, with few requests."""

from __future__ import annotations

import http.server
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import data
from data.errors import StoreError
from data.location import location
from data.store.layout import LevelSize
from data.store.manifest import SlideRecord, load_manifest, merge_manifest
from data.store.slide_store import SlideStore
from data.store.verify import verify_store
from hyfi_core.plan.box import Box
from tests.data.store.test_writer import pixels_of, write_slide
from tests.object_server import ObjectServer, bucket, copy_to, server

__all__ = ["bucket", "server"]

SIZES = [LevelSize(600, 4700), LevelSize(300, 2350)]
BOX = Box(400, 590, 3800, 4500)
"""Two rows of two chunks, one in each of two shards."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one slide of two shards."""
    store = tmp_path_factory.mktemp("store")
    write_slide(store, pixels_of(SIZES))
    (name,) = [path.name.removesuffix(".zarr") for path in store.glob("*.zarr")]
    SlideRecord(name, "/x.svs", "done", store_mpp=1.0, height_px=600, width_px=4700).save(store)
    merge_manifest(store)
    return store


@pytest.fixture
def place(folder: Path, bucket: str) -> Path:
    return copy_to(folder, location(f"{bucket}/store"))


def name_in(folder: Path) -> str:
    return data.slide_ids(folder)[0]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_same_pixels_without_listing_and_only_the_parts_needed(
    folder: Path, place: Path, server: ObjectServer, threads: int
) -> None:
    name = name_in(folder)
    here, there = data.open_store(folder, name), data.open_store(str(place), name)
    there = pickle.loads(pickle.dumps(there))
    before = len(server.requests)
    assert np.array_equal(here.read(BOX, 0, threads), there.read(BOX, 0, threads))
    requests = server.requests[before:]
    assert {one[0] for one in requests} == {"GET"} and not [one for one in requests if "list-type" in one[2]]
    assert all(one[3] for one in requests), "every request is of a range"
    tails = [one for one in requests if one[3].startswith("bytes=-")]
    assert len(tails) == 2 == len({one[1] for one in tails}), "each index once"
    spans = [one[3].removeprefix("bytes=").split("-") for one in requests if not one[3].startswith("bytes=-")]
    wanted = sum(int(end) - int(start) + 1 for start, end in spans)
    shards = [there.attributes["shards"][f"0/c/0/0/{column}"]["size"] for column in "01"]
    assert len(spans) == 4 and wanted < 0.3 * sum(shards)
    before = len(server.requests)
    there.read(BOX, 0)
    assert len(server.requests) - before == 4, "indexes are kept"
    before = len(server.requests)
    assert np.array_equal(there.tissue()[0], here.tissue()[0])
    assert len(server.requests) - before == 1, "a small object is read with its index"


def test_slides_and_manifest_are_found_by_name(folder: Path, place: Path, server: ObjectServer) -> None:
    before = len(server.requests)
    assert data.slide_ids(str(place)) == data.slide_ids(folder) and load_manifest(place) == load_manifest(folder)
    assert [one[:2] for one in server.requests[before:]] == [("GET", f"/{place.parts[1]}/store/manifest.csv")] * 2
    with pytest.raises(StoreError, match="no ingested slide of this name"):
        data.open_store(place, "other")
    with pytest.raises(StoreError, match="not a store"):
        data.slide_ids(place / "other")


def test_what_is_missing_or_cut_short_is_an_error_at_opening_or_at_reading(folder: Path, place: Path) -> None:
    slide = place / f"{name_in(folder)}.zarr"
    shard = slide / "0/c/0/0/1"
    whole = shard.read_bytes()
    for damaged, at_opening in ((whole[:-10], "bytes, expected"), (whole[:9000], "bytes, expected"), (None, "missing")):
        if damaged is None:
            shard.unlink()
        else:
            shard.write_bytes(damaged)
        with pytest.raises(StoreError, match=f"0/c/0/0/1: .*{at_opening}"):
            SlideStore.open(slide)
        unchecked = SlideStore.open(slide, check_files=False)
        assert unchecked.read(Box(0, 600, 0, 600)).shape == (3, 600, 600)
        with pytest.raises(StoreError, match="0/c/0/0/1: "):
            unchecked.read(BOX)
    shard.write_bytes(whole[:5000] + b"\0" * 100 + whole[5100:])
    with pytest.raises(StoreError, match="the checksum is wrong"):
        SlideStore.open(slide).read(Box(0, 500, 4200, 4600))


def test_verification_finds_every_kind_of_damage(folder: Path, place: Path) -> None:
    assert verify_store(place, 4).faults == [] and verify_store(place, 4).files == verify_store(folder, 4).files
    slide = place / f"{name_in(folder)}.zarr"
    whole = (slide / "1/c/0/0/0").read_bytes()
    (slide / "1/c/0/0/0").write_bytes(whole[:5000] + b"\0" * 100 + whole[5100:])
    (slide / "0/c/0/0/1").unlink()
    (slide / "foreign").write_bytes(b"x")
    (place / "half.zarr/0/c/0/0/0").write_bytes(b"of an interrupted upload")
    reasons = {fault.path.name: fault.reason for fault in verify_store(place, 4).faults}
    assert set(reasons) == {"0", "1", "foreign"} and "missing" in reasons["1"]


def test_a_slide_is_written_to_object_storage_as_to_a_folder(tmp_path: Path, bucket: str, server: ObjectServer) -> None:
    store, levels = location(f"{bucket}/new"), pixels_of(SIZES)
    slide = write_slide(store, levels, identity={"a": 1}, scratch=tmp_path)
    assert slide.path == store / slide.path.name and not [p for p in tmp_path.rglob("*") if p.is_file()]
    assert np.array_equal(slide.read(BOX), levels[0][:, BOX.y0 : BOX.y1, BOX.x0 : BOX.x1])
    assert verify_store(store, 2).slides == 1


def test_a_slide_whose_upload_broke_is_uploaded_by_the_next_writer(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, levels = location(f"{bucket}/new"), pixels_of(SIZES)
    with monkeypatch.context() as patch:
        patch.setattr("data.files.sizes_of", lambda folder, names: {})
        with pytest.raises(OSError, match="incomplete after the upload"):
            write_slide(store, levels, identity={"a": 1}, scratch=tmp_path)
    assert not list(SlideStore.open(p) for p in store.glob("*.zarr") if p.exists())
    written: list[str] = []
    monkeypatch.setattr("data.store.writer.write_file", lambda path, *_: written.append(str(path)))
    slide = write_slide(store, levels, identity={"a": 1}, scratch=tmp_path)
    assert written == [] and np.array_equal(slide.read(BOX), levels[0][:, BOX.y0 : BOX.y1, BOX.x0 : BOX.x1])


def test_memory_is_a_store_of_this_process(folder: Path, tmp_path: Path) -> None:
    place = copy_to(folder, location(f"memory://{tmp_path.name}/store"))
    slide = data.open_store(str(place), name_in(folder))
    assert np.array_equal(slide.read(BOX), data.open_store(folder, name_in(folder)).read(BOX))


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """A web server of files, with ranges."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content, code, asked = path.read_bytes(), 200, self.headers.get("Range", "").removeprefix("bytes=")
        size = len(content)
        if asked:
            first, _, last = asked.partition("-")
            start, end = (max(0, size - int(last)), size) if not first else (int(first), min(int(last) + 1, size))
            content, code = content[start:end], 206
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", self.date_time_string())
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{size}")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Context with a web server of a folder; yields its address."""
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=str(folder)))
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.fixture
def website(folder: Path) -> Iterator[str]:
    with serve_folder(folder.parent) as address:
        yield f"{address}/{folder.name}"


def test_a_web_server_that_cannot_list_is_read_and_verified(folder: Path, website: str) -> None:
    slide = data.open_store(website, data.slide_ids(website)[0])
    assert np.array_equal(slide.read(BOX), data.open_store(folder, name_in(folder)).read(BOX))
    found = verify_store(location(website), 2)
    assert found.faults == [] and found.slides == 1
    with pytest.raises(StoreError, match="not a store"):
        data.slide_ids(f"{website}/x")
