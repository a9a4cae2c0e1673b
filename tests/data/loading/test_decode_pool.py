"""Workers that die, in real processes: nothing is lost, nothing is altered, nobody stays behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.arrays import Pixels
from data.loading.decode import Lease, part_bytes
from data.loading.decode_pool import MAX_DEATHS_OF_A_SAMPLE, DecodePool, Leases
from data.loading.decode_worker import ChildWorker
from data.loading.sample_cache import SampleCache
from hyfi_core.plan.box import Box
from tests.data.loading.thread_worker import ThreadWorker
from tests.data.numbered_images import HEIGHT, WIDTH, BrokenImages, Images
from tests.patience import PATIENCE_S

WHOLE = Box.of_size(HEIGHT, WIDTH)
BOXES = (Box(0, 20, 0, 53), Box(17, 37, 5, 50))
SLOT_BYTES = sum(part_bytes(box) for box in BOXES)


def pool_of(images: Images, workers: int, slots: int, cached: int = 0) -> DecodePool:
    place = part_bytes(WHOLE)
    return DecodePool(images, workers, slots, SLOT_BYTES, place, cached * place, ChildWorker)


def run_through(pool: DecodePool, count: int, between: Callable[[int], None] = lambda done: None) -> int:
    """Ask for samples as slots come free and compare each with what it has to be; return how many were right."""
    images, asked, done = Images(), 0, 0
    deadline = time.monotonic() + PATIENCE_S
    while done < count:
        assert time.monotonic() < deadline
        while pool.has_free_slot and asked < count:
            pool.submit(asked, asked // 5, asked % 5, BOXES)
            asked += 1
        pool.collect()
        while (parts := pool.parts(done)) is not None if done < asked else False:
            for part, box in zip(parts, BOXES, strict=True):
                assert np.array_equal(part, images.read(done % 5, box, done // 5))
            pool.release(done)
            done += 1
        between(done)
        pool.wait(0.002)
    return done


def kill_some(pool: DecodePool, kills: int, seed: int) -> Callable[[int], None]:
    """Return what kills one worker at a time, at random moments."""
    rng = random.Random(seed)
    left, when_s = kills, [time.monotonic() + rng.uniform(0.3, 0.6)]

    def between(done: int) -> None:
        nonlocal left
        if left and time.monotonic() > when_s[0]:
            os.kill(rng.choice(pool.workers).pid, signal.SIGKILL)
            left -= 1
            when_s[0] = time.monotonic() + rng.uniform(0.1, 0.6)

    return between


def disturbed(kills: int, count: int, delay_s: float) -> None:
    pool = pool_of(Images(delay_s), workers=2, slots=4, cached=2)
    try:
        assert run_through(pool, count, kill_some(pool, kills, seed=kills)) == count
        assert pool.counts.replaced == kills
        assert pool.counts.samples == count
    finally:
        pool.close()


def test_a_killed_worker_costs_nothing_but_time() -> None:
    disturbed(kills=2, count=40, delay_s=0.03)


@pytest.mark.soak
def test_twenty_killed_workers_cost_nothing_but_time() -> None:
    disturbed(kills=20, count=300, delay_s=0.05)


def test_children_do_not_outlive_their_pool() -> None:
    pool = pool_of(Images(delay_s=30.0), workers=2, slots=2)
    pids = [worker.pid for worker in pool.workers]
    pool.submit(0, 0, 0, BOXES)
    pool.collect()
    pool.close()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_what_a_child_raises_is_raised_here_with_its_traceback() -> None:
    pool = pool_of(BrokenImages(), workers=1, slots=1)
    pool.submit(0, 1, 0, BOXES)
    with pytest.raises(OSError, match="cannot be decoded") as caught:
        for _ in range(3000):
            pool.collect()
            pool.wait(0.01)
    pool.close()
    assert "in vary" in caught.value.__notes__[0]


class ExitingImages(Images):
    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        raise SystemExit("a library has given up")


def test_an_exit_in_a_decoding_thread_is_an_error_and_no_endless_wait() -> None:
    pool = DecodePool(ExitingImages(), 1, 1, SLOT_BYTES, start=ThreadWorker)
    pool.submit(0, 1, 0, BOXES)
    with pytest.raises(RuntimeError, match="SystemExit: a library has given up"):
        for _ in range(300):
            pool.collect()
            pool.wait(0.01)


class SpeechlessImages(Images):
    """Raises an error that can be neither pickled nor printed."""

    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        class SpeechlessError(Exception):
            def __str__(self) -> str:
                raise ValueError("no text")

        raise SpeechlessError


def test_an_error_without_a_text_is_an_error_and_no_endless_wait() -> None:
    pool = DecodePool(SpeechlessImages(), 1, 1, SLOT_BYTES, start=ThreadWorker)
    pool.submit(0, 1, 0, BOXES)
    with pytest.raises(RuntimeError, match="SpeechlessError"):
        for _ in range(300):
            pool.collect()
            pool.wait(0.01)


class Unpicklable(Images):
    def __setstate__(self, state: dict[str, object]) -> None:
        os._exit(3)


def test_workers_that_never_start_are_not_replaced_for_ever() -> None:
    pool = pool_of(Unpicklable(), workers=1, slots=1)
    with pytest.raises(RuntimeError, match="keep dying before they finish a sample"):
        for _ in range(3000):
            pool.collect()
            pool.wait(0.01)
    pool.close()


class SlowImages(Images):
    """Images whose reading waits until two are being read, if they may be."""

    together: threading.Barrier | None = None

    def read_plain(self, index: int, box: Box) -> np.ndarray:
        if SlowImages.together is not None:
            SlowImages.together.wait(PATIENCE_S)
        return super().read_plain(index, box)


def test_a_worker_may_prepare_two_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowImages, "together", threading.Barrier(2))
    pool = DecodePool(SlowImages(), 1, 4, SLOT_BYTES, start=ThreadWorker, at_a_time=2)
    assert run_through(pool, 12) == 12 == pool.counts.samples
    pool.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_stays_when_descriptors_are_closed() -> None:
    before = open_files()
    pool = DecodePool(Images(), 1, 1, SLOT_BYTES, start=ThreadWorker)
    pool.submit(0, 0, 0, BOXES)
    while pool.parts(0) is None:
        pool.collect()
        pool.wait(0.01)
    part = pool.parts(0)[0]
    pool.close()
    assert np.array_equal(part, Images().read(0, BOXES[0], 0))
    del part, pool
    deadline = time.monotonic() + PATIENCE_S
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before


def lease(number: int) -> Lease:
    return Lease(number, 0, number, BOXES, 0, WHOLE)


def test_a_lost_lease_is_issued_first_and_not_for_ever() -> None:
    leases = Leases()
    for number in range(3):
        leases.add(lease(number))
    assert leases.issue(0).name == 0 and leases.issue(1).name == 1
    leases.requeue(0)
    assert leases.issue(0).name == 0
    assert leases.finish(1, 1).name == 1
    assert leases.issue(1).name == 2 and leases.issue(2) is None
    for _ in range(MAX_DEATHS_OF_A_SAMPLE - 2):
        leases.requeue(0)
        assert leases.issue(0).name == 0
    with pytest.raises(RuntimeError, match=f"{MAX_DEATHS_OF_A_SAMPLE} decoding processes died in a row at sample 0"):
        leases.requeue(0)
    leases.requeue(7)  # it held nothing


def test_all_leases_of_a_lost_worker_are_issued_again_in_order() -> None:
    leases = Leases()
    for number in range(4):
        leases.add(lease(number))
    assert [leases.issue(0).name, leases.issue(1).name, leases.issue(0).name] == [0, 1, 2]
    assert leases.finish(0, 2).name == 2
    assert leases.issue(0).name == 3
    leases.requeue(0)
    assert [leases.issue(1).name, leases.issue(1).name, leases.issue(1)] == [0, 3, None]


def test_the_cache_keeps_who_is_in_use_and_forgets_the_oldest() -> None:
    cache = SampleCache(25, 10)  # room for two
    first, second = cache.acquire(1, WHOLE), cache.acquire(2, WHOLE)
    assert (first.offset, second.offset, first.valid) == (0, 10, False)
    assert cache.acquire(1, WHOLE) is None  # being written
    assert cache.acquire(3, WHOLE) is None  # no room: both are in use
    cache.release(1, WHOLE)
    cache.release(2, WHOLE)
    assert cache.acquire(1, WHOLE).valid
    third = cache.acquire(3, WHOLE)  # takes the place of 2: 1 is in use, and was asked for since
    assert third.offset == 10 and not third.valid
    assert cache.acquire(2, WHOLE) is None
    assert SampleCache(9, 10).acquire(1, WHOLE) is None
