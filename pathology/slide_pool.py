"""Slides in worker processes: one that kills its worker fails alone."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from data.files import remove_leftovers
from data.manifest import FAILED, SlideRecord
from data.store import slide_path
from pathology.discover import SlideJob, user_columns
from pathology.ingest_options import IngestOptions

_PR_SET_PDEATHSIG = 1


def ingest_all(
    jobs: Sequence[SlideJob], store: Path, options: IngestOptions, workers: int, finished: Callable[[SlideRecord], None]
) -> None:
    """Ingest every job and call ``finished`` with each record as it comes.

    Args:
        jobs: The slides.
        store: The store's folder.
        options: See there.
        workers: Processes; 1 works in this process.
        finished: Called in this process.

    Raises:
        OSError: The store cannot be written.
    """
    if workers <= 1:
        for job in jobs:
            finished(_work(job, store, options))
        return
    waiting = list(reversed(jobs))
    while waiting:
        suspects = _until_broken(waiting, store, options, workers, finished)
        for job in suspects:
            finished(_alone(job, store, options))


def _until_broken(
    waiting: list[SlideJob], store: Path, options: IngestOptions, workers: int, finished: Callable[[SlideRecord], None]
) -> list[SlideJob]:
    """Take jobs off ``waiting`` until none is left or a worker dies; return those that were under way then."""
    running: dict[Future[SlideRecord], SlideJob] = {}
    with _pool(workers) as pool:
        try:
            while waiting or running:
                while waiting and len(running) < 2 * workers:
                    job = waiting.pop()
                    running[pool.submit(_work, job, store, options)] = job
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    record = future.result()
                    del running[future]
                    finished(record)
        except BrokenProcessPool:
            return list(running.values())
        except BaseException:
            _end_workers(pool)
            for job in running.values():
                remove_leftovers(slide_path(store, job.slide_id))
            raise
    return []


def _alone(job: SlideJob, store: Path, options: IngestOptions) -> SlideRecord:
    """Ingest one slide in a process of its own."""
    with _pool(1) as pool:
        try:
            return pool.submit(_work, job, store, options).result()
        except BrokenProcessPool:
            remove_leftovers(slide_path(store, job.slide_id))
            reason = "the process that decoded it died (a crash in the decoder, or out of memory)"
            record = SlideRecord(job.slide_id, str(job.source), FAILED, reason=reason, extra=user_columns(job.row))
            record.save(store)
            return record


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, not forked: readers and their threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        yield pool


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # Dies with its parent, however that ends.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_workers(pool: ProcessPoolExecutor) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.terminate()
    for process in multiprocessing.active_children():
        process.join(5)


def _work(job: SlideJob, store: Path, options: IngestOptions) -> SlideRecord:
    from pathology.ingest_slide import ingest_slide

    return ingest_slide(job.source, store, options, job.row, job.slide_id)


def default_workers() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
