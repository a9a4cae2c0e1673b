"""A decoding worker on one core, as that of a loader, for benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from data.loading.decode import Samples
from data.loading.decode_pool import DecodePool
from data.loading.decode_worker import ChildWorker, Memory, Worker
from hyfi_core.plan.box import Box

AHEAD = 8
"""Images that the worker has ahead."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@contextmanager
def on_cores(number: int) -> Iterator[None]:
    """Context in which children start on one core: ``number`` counts the cores of this process, -1 is the last."""
    allowed = os.sched_getaffinity(0)
    # A child inherits the affinity of this process at its start. Set later, it would not reach all of its threads.
    os.sched_setaffinity(0, {sorted(allowed)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def start_on_a_core(memory: Memory) -> Worker:
    """Start a worker on the first core."""
    with on_cores(0):
        return ChildWorker(memory)


@dataclass(frozen=True)
class Preparing:
    """The time in which a worker prepared all images once.

    Attributes:
        seconds: Seconds by the clock.
        cpu_s: Seconds of processor time, at least one tick of its clock. Other processes hardly lengthen them.
    """

    seconds: float
    cpu_s: float


def preparing(
    samples: Samples, count: int, size_px: tuple[int, int], passes: int, at_a_time: int = 1
) -> list[Preparing]:
    """Return the time in which a worker on one core prepares images, for each pass; the first image is not counted.

    Args:
        samples: Reads and augments images; their number is ``count``.
        count: Number of images, at least 2.
        size_px: (height, width) of an image.
        passes: How often all images are prepared.
        at_a_time: Number of images that the worker reads concurrently.
    """
    extent, measured = Box.of_size(*size_px), []
    pool = DecodePool(samples, 1, slots=AHEAD, slot_bytes=3 * extent.area, start=start_on_a_core, at_a_time=at_a_time)
    try:
        _prepare(pool, [0], extent)  # not timed: the worker starts and connects
        for _ in range(passes):
            begin, used = time.perf_counter(), _cpu_s(pool)
            _prepare(pool, range(1, count), extent)
            # At least a tick, in which processor time is counted: it is divided by.
            measured.append(Preparing(time.perf_counter() - begin, max(_TICK_S, _cpu_s(pool) - used)))
        return measured
    finally:
        pool.close()


def _cpu_s(pool: DecodePool) -> float:
    """Return the processor time of the pool's only worker so far."""
    (worker,) = pool.workers
    assert isinstance(worker, ChildWorker)
    return cpu_s(worker.pid)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    # utime and stime are the fields 14 and 15 of /proc/pid/stat. The name, field 2, may have spaces and brackets: only
    # what follows its last bracket is split.
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK_S


def _prepare(pool: DecodePool, images: Sequence[int], extent: Box) -> None:
    """Prepare images in order, as many ahead as the pool has slots, and release each when it is ready."""
    submitted = 0
    for number in range(len(images)):
        # While every slot has an image, the worker never waits for this process.
        while submitted < len(images) and pool.has_free_slot:
            pool.submit(name=submitted, epoch=0, index=images[submitted], boxes=(extent,))
            submitted += 1
        while pool.parts(number) is None:
            if not pool.collect():
                pool.wait(1.0)
        pool.release(number)
