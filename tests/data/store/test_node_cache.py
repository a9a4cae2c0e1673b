"""Decoded chunks shared on a node: read once from the store, whoever needs them, and never other pixels."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
from data.arrays import Pixels
from data.errors import StoreError
from data.location import location
from data.store.codec import CRC_BYTES
from data.store.layout import LevelSize
from data.store.node_cache import VARIABLE, CacheRoom, NodeCache, node_cache, share_on_node
from data.store.slide_store import SlideStore
from data.store.writer import SlideWriter
from hyfi_core.plan.box import Box
from tests.data.store.test_writer import pixels_of, write_slide
from tests.object_server import ObjectServer, bucket, copy_to, server

__all__ = ["bucket", "server"]

SIZES = [LevelSize(1100, 4700)]
BOXES = [Box(0, 700, 3500, 4500), Box(500, 1100, 3900, 4700), Box(0, 1100, 3000, 4700), Box(300, 301, 0, 4700)]


@pytest.fixture
def slide(tmp_path: Path) -> SlideStore:
    return write_slide(tmp_path / "store", pixels_of(SIZES))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCache:
    monkeypatch.setenv(VARIABLE, "")
    share_on_node(2**30, tmp_path / "cache")
    found = node_cache()
    assert found is not None
    return found


def read_all(path: str, times: int) -> None:
    slide = data.open_store(path)
    for _ in range(times):
        for box in BOXES:
            slide.read(box)


def test_pixels_are_those_of_the_store_and_are_decoded_once(slide: SlideStore, cache: NodeCache) -> None:
    (pixels,) = pixels_of(SIZES)
    for _ in range(2):
        for box in BOXES:
            for threads in (1, 3):
                assert np.array_equal(slide.read(box, 0, threads), pixels[:, *box.slices()])
    chunks, indexes = 3 * 5 + 5, 2
    assert (
        cache.store_bytes == chunks * 3 * 512 * 512 + indexes * 64 * 16 and cache.shared_bytes > 2 * cache.store_bytes
    )
    mask, _ = slide.tissue()
    assert np.array_equal(slide.tissue()[0], mask)


def test_every_part_is_requested_once_by_all_processes_and_threads_of_a_node(
    slide: SlideStore, cache: NodeCache, bucket: str, server: ObjectServer
) -> None:
    place = str(copy_to(slide.path, location(f"{bucket}/s.zarr")))
    before = len(server.requests)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=read_all, args=(place, 2)) for _ in "12"]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=read_all, args=(place, 2)) for _ in "123"]
    for thread in threads:
        thread.start()
    for one in (*threads, *processes):
        one.join()
    assert [process.exitcode for process in processes] == [0, 0]
    read: Counter[tuple[str, int]] = Counter()
    for method, path, _, span in server.requests[before:]:
        if method == "GET" and "/0/c/" in path:
            first, _, last = span.removeprefix("bytes=").partition("-")
            read.update([(path, -1)] if not first else [(path, offset) for offset in (int(first), int(last))])
    assert read and set(read.values()) == {1}, "no index and no chunk twice"


def test_a_slide_that_was_ingested_again_has_its_own_chunks(slide: SlideStore, cache: NodeCache) -> None:
    old = slide.read(BOXES[0])
    other = write_slide(slide.path.parent, pixels_of(SIZES, seed=9))
    assert not np.array_equal(other.read(BOXES[0]), old) and np.array_equal(
        other.read(BOXES[0]), pixels_of(SIZES, seed=9)[0][:, *BOXES[0].slices()]
    )


def test_damage_in_the_cache_is_read_again_and_damage_in_the_store_is_an_error(
    slide: SlideStore, cache: NodeCache, tmp_path: Path
) -> None:
    wanted = slide.read(BOXES[0])
    for path in (tmp_path / "cache").glob("[!l]*"):
        path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert np.array_equal(SlideStore.open(slide.path).read(BOXES[0]), wanted)
    shard = slide.path / "0/c/0/0/0"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:3000] + b"\0" * 99 + whole[3099:])
    with pytest.raises(StoreError, match="the checksum is wrong"):
        SlideStore.open(slide.path).read(Box(0, 10, 0, 10))
    assert np.array_equal(SlideStore.open(slide.path).read(BOXES[0]), wanted), "the lock was released"


def test_the_cache_keeps_its_size_and_what_was_used_last(slide: SlideStore, tmp_path: Path) -> None:
    chunk = 3 * 512 * 512
    cache = NodeCache(tmp_path / "small", 10 * chunk)
    for number in range(40):
        pixels = np.full(chunk, number, np.uint8)
        list(cache.read("row", {0: f"chunk {number}"}, (chunk,), lambda slots, read=pixels: [(0, read)]))
        ((_, first),) = cache.read("row", {0: "chunk 0"}, (chunk,), lambda slots: [])
        assert first is not None and first[0] == 0
    held = [path.stat().st_size for path in (tmp_path / "small").glob("[!l]*")]
    assert 5 * chunk < sum(held) <= 11 * chunk


def test_other_files_beside_the_chunks_stay(slide: SlideStore, tmp_path: Path) -> None:
    chunk = 3 * 512 * 512
    (tmp_path / "results.npy").write_bytes(bytes(20 * chunk))
    cache = NodeCache(tmp_path, 10 * chunk)
    for number in range(20):
        list(cache.read("row", {0: f"{number}"}, (chunk,), lambda slots: [(0, np.zeros(chunk, np.uint8))]))
    assert (tmp_path / "results.npy").stat().st_size == 20 * chunk
    assert len(list(tmp_path.glob("[0-9a-f]" * 40))) > 5


def test_chunks_are_of_their_user_alone(cache: NodeCache, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="makes a link of another user")
def test_a_link_that_another_user_has_placed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    os.lchown(tmp_path / "link", 4711, 4711)
    with pytest.raises(OSError, match="belongs to another user"):
        NodeCache(tmp_path / "link", 1)


def test_a_cache_that_is_removed_while_it_is_used_costs_time_only(
    slide: SlideStore, cache: NodeCache, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "cache")
    for path in (slide.path, slide.path):
        found = SlideStore.open(path).read(BOXES[0])
        assert np.array_equal(found, pixels_of(SIZES)[0][:, *BOXES[0].slices()])


def test_a_disk_without_locks_is_used_without_them(
    slide: SlideStore, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("data.store.node_cache.fcntl.flock", refuse)
    assert np.array_equal(slide.read(BOXES[0]), pixels_of(SIZES)[0][:, *BOXES[0].slices()])


def test_a_full_disk_ends_the_adding_and_is_said_once(
    slide: SlideStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes of a node, each with its view of the cache; what is in it stays in use."""
    monkeypatch.setenv(VARIABLE, "")
    share_on_node(2**30, tmp_path / "cache")
    first, second = node_cache(), NodeCache(tmp_path / "cache", 2**30)
    assert first is not None
    chunk, writes = 3 * 512 * 512, []

    def read(cache: NodeCache, name: str) -> Pixels:
        ((_, found),) = cache.read("row", {0: name}, (chunk,), lambda slots: [(0, np.full(chunk, 7, np.uint8))])
        assert found is not None
        return found

    read(first, "before")

    def full(*given: object) -> bytes:
        writes.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data.store.node_cache.joined", full)
    for name in "abc":
        assert read(first, name)[0] == read(second, name)[0] == 7
    assert len(writes) == 2, "it was tried again and again"
    (said,) = (record.getMessage() for record in caplog.records)
    assert "no room left (No space left on device; " in said and "GB free of" in said and f"={2**30}" in said
    shared = second.shared_bytes
    assert read(second, "before")[0] == 7 and second.shared_bytes == shared + chunk
    assert {path.name for path in (tmp_path / "cache").iterdir()} > {"locks"}


def test_room_is_what_is_free_and_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(tmp_path / "cache", 2**30)
    list(cache.read("row", {0: "a"}, (1000,), lambda slots: [(0, np.zeros(1000, np.uint8))]))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=5000, free=2000))
    assert cache.room() == CacheRoom(usable_bytes=3000 + CRC_BYTES, disk_bytes=5000)


def test_chunks_left_out_stay_background(tmp_path: Path, cache: NodeCache) -> None:
    mask = np.zeros((138, 588), bool)
    mask[:40, :40] = True
    from data.store.layout import pyramid_levels

    (tmp_path / "blank").mkdir()
    with SlideWriter(tmp_path / "blank", "s", pyramid_levels(SIZES, 1.0), tissue=(mask, 8.0)) as writer:
        (pixels,) = pixels_of(SIZES)
        for x in (0, 4096):
            writer.write(0, 0, x, pixels[:, :, x : x + 4096])
        writer.write_tissue(mask, 8.0)
        writer.publish({"kind": "resampled"})
    for _ in range(2):
        found = data.open_store(tmp_path / "blank", "s").read(Box(0, 1100, 3000, 4700))
        assert (found == 255).all()


def test_no_setting_no_cache_and_a_folder_of_others_is_refused(
    slide: SlideStore, cache: NodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_on_node(0)
    assert node_cache() is None and slide.read(BOXES[0]).shape == (3, 700, 1000)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(OSError, match="belongs to another user"):
        share_on_node(1, tmp_path / "other")
