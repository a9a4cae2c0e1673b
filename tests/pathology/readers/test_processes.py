"""Readers that were opened in a parent, used by many threads and by forked and spawned children at once."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers import threads as source_threads
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.per_thread import PerThread
from pathology.readers.slide_file import SlideFile, coalesced
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import BadTile
from pathology.readers.sources import open_source
from pathology.readers.threads import decode_threads, run_in_pool, set_decode_threads
from tests.pathology.readers.scanners import jpeg, smooth, write_encoded, write_leica
from tests.patience import PATIENCE_S


def bad_reads(sources: list[SlideSource], whole: list[np.ndarray], seed: int, count: int) -> int:
    """Return how many of ``count`` random reads differ from the picture."""
    rng = np.random.default_rng(seed)
    wrong = 0
    for k in range(count):
        source, image = sources[k % len(sources)], whole[k % len(sources)]
        y0, x0 = rng.integers(0, image.shape[0] - 1), rng.integers(0, image.shape[1] - 1)
        box = Box(y0, rng.integers(y0, image.shape[0]) + 1, x0, rng.integers(x0, image.shape[1]) + 1)
        wrong += not np.array_equal(source.read(box, 0), image[box.slices()])
    return wrong


def child(sources: list[SlideSource], whole: list[np.ndarray], seed: int, count: int, result: object) -> None:
    result.put(bad_reads(sources, whole, seed, count))  # type: ignore[attr-defined]


def opened(folder: Path) -> tuple[list[SlideSource], list[np.ndarray]]:
    image = smooth(900, 1100)
    path = write_encoded(folder / "a.svs", [image], partial(jpeg, stored="ycbcr"), "jpeg", "ycbcr")
    sources = [open_source(path), OpenSlideSource(path)]
    return sources, [source.read(Box.of_size(900, 1100), 0) for source in sources]


def in_children(sources: list[SlideSource], whole: list[np.ndarray], workers: int, reads: int) -> list[int]:
    """Return the wrong reads of forked and spawned children, while this process reads too."""
    running, results = [], []
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        results.append(context.SimpleQueue())
        for seed in range(workers):
            process = context.Process(target=child, args=(sources, whole, seed, reads, results[-1]), daemon=True)
            process.start()
            running.append(process)
    wrong = [bad_reads(sources, whole, 99, reads)]
    wrong += [result.get() for result in results for _ in range(workers)]
    for process in running:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    return wrong


def test_readers_opened_before_fork_and_spawn_show_no_wrong_pixel(tmp_path: Path) -> None:
    sources, whole = opened(tmp_path)
    busy = threading.Event()
    other = threading.Thread(target=lambda: [bad_reads(sources, whole, 7, 2) for _ in iter(busy.is_set, True)])
    other.start()  # the fork happens while another thread is inside the readers
    try:
        assert in_children(sources, whole, workers=2, reads=20) == [0] * 5
    finally:
        busy.set()
        other.join()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_readers_in_many_children(tmp_path: Path) -> None:
    sources, whole = opened(tmp_path)
    for _ in range(8):
        assert in_children(sources, whole, workers=4, reads=300) == [0] * 9


def test_threads_share_a_reader(tmp_path: Path) -> None:
    sources, whole = opened(tmp_path)
    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(lambda seed: bad_reads(sources, whole, seed, 12), range(6))) == 0


def damaged_leica(folder: Path) -> tuple[Path, np.ndarray, Box]:
    """Return a slide that only OpenSlide reads, its pixels when it was whole, and the place of its damaged tile."""
    path = write_leica(folder / "a.scn", smooth(1100, 1300), (0, 0), (2000, 2000))
    good = OpenSlideSource(path).read(Box.of_size(1100, 1300), 0)
    with tifffile.TiffFile(path) as tiff:
        offset = tiff.pages[1].dataoffsets[4]  # 3 tiles of 512 px in a row
    data = bytearray(path.read_bytes())
    data[offset : offset + 30] = b"\x99" * 30
    path.write_bytes(data)
    return path, good, Box(512, 1024, 512, 1024)


def test_an_error_in_one_thread_leaves_the_others_alone(tmp_path: Path) -> None:
    path, good, tile = damaged_leica(tmp_path)
    source = OpenSlideSource(path)

    def work(thread: int) -> int:
        right = 0
        for k in range(10):
            box = tile if thread % 2 else Box(100 * (k % 5), 512, 0, 600 + k)
            try:
                right += np.array_equal(source.read(box, 0), good[box.slices()])
            except TileError:
                right += box == tile
        return right

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [10] * 4
    source.close()
    assert np.array_equal(source.read(Box(3, 40, 2, 50), 0), good[3:40, 2:50])


def test_openslide_names_the_tile_and_reads_the_others(tmp_path: Path) -> None:
    path, good, tile = damaged_leica(tmp_path)
    source = open_source(path)
    assert isinstance(source, OpenSlideSource)
    bad: list[BadTile] = []
    out = np.empty((1100, 1300, 3), np.uint8)
    source.read_into(Box.of_size(1100, 1300), 0, out, bad)
    inside = [entry.box.intersect(tile).area == entry.box.area for entry in bad]
    assert inside and all(inside) and sum(entry.box.area for entry in bad) == tile.area
    good[tile.slices()] = 255
    assert np.array_equal(out, good)
    with pytest.raises(TileError):
        source.read(Box.of_size(1100, 1300), 0)


def test_a_file_that_changed_under_a_reader_is_told_after_a_fork(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"0123456789")
    file = SlideFile(path)
    assert file.read(2, 3) == b"234" and file.read(8, 5) == b"89"
    if (pid := os.fork()) == 0:  # pragma: no cover
        path.write_bytes(b"another one")
        try:
            file.read(0, 1)
        except SlideError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    file.close()
    with pytest.raises(SlideError, match="closed"):
        file.read(0, 1)


def test_neighbours_are_read_together() -> None:
    offsets, lengths = [500, 0, 100, 5000, 5100], [50, 100, 100, 100, 3000]
    spans = coalesced(offsets, lengths, largest=3000, gap=400)
    assert [(s.offset, s.length, s.members) for s in spans] == [
        (0, 550, (1, 2, 0)),
        (5000, 100, (3,)),
        (5100, 3000, (4,)),
    ]
    assert coalesced([], []) == []
    assert [s.members for s in coalesced([0, 10], [10, 10**9])] == [(0,), (1,)]


def test_objects_belong_to_their_thread_and_are_left_alone_after_a_fork() -> None:
    closed: list[object] = []
    each = PerThread(object, closed.append)
    mine = each.get()
    assert each.get() is mine
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(each.get).result()
    assert other is not mine
    each.drop()
    assert closed == [mine] and each.get() is not mine
    assert other in closed, "its thread has ended"
    if (pid := os.fork()) == 0:  # pragma: no cover
        before = len(closed)
        each.get()
        each.close()
        os._exit(len(closed) - before)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "the child closes its own and not its parent's"


def test_a_pool_waits_for_all_before_it_raises_the_first_error() -> None:
    done = []

    def work(k: int) -> int:
        if k == 1:
            raise ValueError("one")
        time.sleep(0.05)
        done.append(k)
        return k

    threads = decode_threads()
    set_decode_threads(3)
    try:
        with pytest.raises(ValueError, match="one"):
            run_in_pool(work, range(4))
        assert sorted(done) == [0, 2, 3]
        nested = run_in_pool(lambda k: run_in_pool(lambda j: j * k, range(3)), range(5))
        assert nested == [[0, k, 2 * k] for k in range(5)], "a thread of the pool does not wait for others of it"
    finally:
        set_decode_threads(threads)
        source_threads._threads = None
    with pytest.raises(ValueError, match="decoding threads is 0"):
        set_decode_threads(0)


def test_a_sector_that_the_disk_cannot_read_costs_its_tile_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, whole = opened(tmp_path)
    with tifffile.TiffFile(tmp_path / "a.svs") as tiff:
        broken = tiff.pages[0].dataoffsets[11] + 5  # 9 tiles of 128 px in a row
    pread = os.pread

    def failing(handle: int, length: int, offset: int) -> bytes:
        if offset <= broken < offset + length:
            raise OSError(5, os.strerror(5))
        return pread(handle, length, offset)

    monkeypatch.setattr("pathology.readers.slide_file.os.pread", failing)
    bad: list[BadTile] = []
    out = np.empty_like(whole[0])
    sources[0].read_into(Box.of_size(900, 1100), 0, out, bad)
    assert [tile.box for tile in bad] == [Box(128, 256, 256, 384)]
    whole[0][128:256, 256:384] = 255
    assert np.array_equal(out, whole[0])
