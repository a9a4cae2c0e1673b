"""Ingest in worker processes: a slide that crashes its worker does not affect others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from data.children import die_with_parent
from data.cores import usable_cores
from data.files import remove_leftovers
from data.store.manifest import FAILED, SlideRecord
from data.store.slide_store import slide_path
from hyfi_core.collection import start_quickly
from hyfi_core.process_memory import return_what_is_freed
from pathology.claims import is_held, remove_ended
from pathology.ingest.discover import SlideJob, user_columns
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import save_outcome
from pathology.ingest.work import CLAIMS, Outcome, do_job
from pathology.readers.threads import set_decode_threads

_POLL_S = 0.5
"""Interval of progress reports and of checks for slides released by other runs."""

_fractions: Any = None
"""In a worker: shared memory with the completed fraction of each job; without a lock that a dying worker would keep."""


@dataclass(slots=True)
class SlidePool:
    """Ingests jobs in processes.

    Attributes:
        store: The store's folder.
        options: How to ingest; see `IngestOptions`.
        workers: Number of processes; 1: only this process.
        finished: Called in this process with each result.
        progress: Called periodically in this process with the completed fraction of each job.
        take: Returns the index of the next job, None if none is left; None: all jobs in order.
        cores: Number of cores that all workers share; by default, all cores of this process.
    """

    store: Path
    options: IngestOptions
    workers: int
    finished: Callable[[Outcome], None]
    progress: Callable[[Sequence[float]], None] = lambda fractions: None
    take: Callable[[], int | None] | None = None
    cores: int = field(default_factory=usable_cores)
    _jobs: tuple[SlideJob, ...] = field(default=(), init=False)
    # Shared memory with the completed fraction of each job.
    _done: Any = field(default=None, init=False)
    # Indices of jobs: ``_released`` are tried before another job is taken; other runs work on ``_elsewhere``.
    _released: deque[int] = field(default_factory=deque, init=False)
    _elsewhere: deque[int] = field(default_factory=deque, init=False)
    _take: Callable[[], int | None] = field(default=lambda: None, init=False)

    def run(self, jobs: Sequence[SlideJob]) -> None:
        """Ingest all jobs that ``take`` returns; return when all are finished, here or by other runs.

        Raises:
            OSError: The store cannot be written.
        """
        self._jobs = tuple(jobs)
        # RawArray has no lock, which a dying worker would keep. Only one worker writes the number of a job.
        self._done = multiprocessing.get_context("spawn").RawArray("d", max(1, len(jobs)))
        self._released, self._elsewhere = deque(), deque()  # jobs to try again, jobs that other runs work on
        numbers = iter(range(len(jobs)))
        self._take = self.take or (lambda: next(numbers, None))
        while True:
            number = self._next()
            if number is None and not self._elsewhere:
                return
            if number is None:
                self._wait_for_others()
            elif self.workers <= 1:
                self._run_here(number)
            else:
                # Put it back to the front, from where `_run_in_workers` takes it before other jobs.
                self._released.appendleft(number)
                # One of these jobs has killed its worker: alone, only that one fails.
                for broken in self._run_in_workers():
                    self._finish(broken, self._run_alone(broken))

    def _next(self) -> int | None:
        """Return the index of the job to try next; None if there is none at the moment."""
        return self._released.popleft() if self._released else self._take()

    def _wait_for_others(self) -> None:
        """Move slides that no other run holds any more to ``_released``; sleep if there are none."""
        for _ in range(len(self._elsewhere)):
            number = self._elsewhere.popleft()
            claimed = is_held(self.store / CLAIMS, self._jobs[number].slide_id)
            (self._elsewhere if claimed else self._released).append(number)
        if not self._released:
            time.sleep(_POLL_S)
            self.progress(self._done)

    def _run_here(self, number: int) -> None:
        """Process one job in this process."""

        def progress(fraction: float) -> None:
            self._done[number] = fraction
            self.progress(self._done)

        self._finish(number, do_job(self._jobs[number], self.store, self.options, self.cores, progress))

    def _finish(self, number: int, outcome: Outcome | None) -> None:
        """Report a job's result; None: another run works on it, so it is checked again later."""
        if outcome is None:
            self._elsewhere.append(number)
            return
        self._done[number] = 1.0
        self.finished(outcome)
        self.progress(self._done)

    def _run_in_workers(self) -> list[int]:
        """Process jobs until none is left or a worker dies; return the indices of jobs that were then running."""
        running: dict[Future[Outcome | None], int] = {}
        children_before = multiprocessing.active_children()
        with _pool(self.workers, self._done, self._threads) as pool:
            try:
                while True:
                    # One more job than workers, so that no worker waits for its next job.
                    while len(running) <= self.workers and (number := self._next()) is not None:
                        running[self._submit(pool, number)] = number
                    if not running:
                        return []
                    for future in wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
                        outcome = future.result()
                        self._finish(running.pop(future), outcome)
                    self.progress(self._done)
            # Python ends all workers and does not say which one died, so the caller tries each running slide alone.
            except BrokenProcessPool:
                return list(running.values())
            except BaseException:
                # End the workers before removing claims: a running worker would write a slide that others may take.
                _end_workers(pool, children_before)
                for number in running.values():
                    self._remove_unfinished(number)
                raise

    def _submit(self, pool: ProcessPoolExecutor, number: int) -> Future[Outcome | None]:
        with _interrupts_blocked():  # the first submission starts the workers
            return pool.submit(_work, number, self._jobs[number], self.store, self.options, self._threads)

    @property
    def _threads(self) -> int:
        """Threads of each worker: the cores divided by the workers."""
        return max(1, self.cores // self.workers)

    def _run_alone(self, number: int) -> Outcome | None:
        """Ingest one slide in a separate process; if that dies, the slide fails. None: another run works on it."""
        job = self._jobs[number]
        children_before = multiprocessing.active_children()
        with _pool(1, self._done, self._threads) as pool:
            try:
                return self._submit(pool, number).result()
            except BrokenProcessPool:
                self._remove_unfinished(number)
                reason = "the process that decoded it died (a crash in the decoder, or out of memory)"
                path = "" if job.secret else str(job.source)
                record = SlideRecord(job.slide_id, path, FAILED, reason=reason, extra=user_columns(job.row))
                save_outcome(record, self.store)
                return Outcome(record, job)
            except BaseException:
                # Otherwise the pool would wait until the slide is done.
                _end_workers(pool, children_before)
                self._remove_unfinished(number)
                raise

    def _remove_unfinished(self, number: int) -> None:
        """Remove the claim and the unfinished files of a slide whose worker has ended."""
        remove_ended(self.store / CLAIMS, self._jobs[number].slide_id)
        remove_leftovers(slide_path(self.store, self._jobs[number].slide_id))


@contextlib.contextmanager
def _pool(workers: int, fractions: Any, threads: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, because readers and their threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(fractions, threads)) as pool:
        yield pool


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C while processes start, until they ignore it: they would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(fractions: Any, threads: int) -> None:
    """Prepare a worker process, before its first slide."""
    global _fractions
    start_quickly()  # imported modules are not garbage, so do not search them
    _fractions = fractions
    # Before the first slide is opened, because the pool of decoding threads cannot change its size.
    set_decode_threads(threads)
    return_what_is_freed()
    # A terminal sends Ctrl-C to all processes of the group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # the parent ended before `die_with_parent`
        os._exit(1)


def _end_workers(pool: ProcessPoolExecutor, others: Sequence[BaseProcess]) -> None:
    """End the processes of a pool at once; ``others``: child processes that do not belong to the pool."""
    workers = [process for process in multiprocessing.active_children() if process not in others]
    pool.shutdown(wait=False, cancel_futures=True)
    for process in workers:
        process.terminate()
    for process in workers:
        process.join(5)


def _work(number: int, job: SlideJob, store: Path, options: IngestOptions, threads: int) -> Outcome | None:
    def progress(fraction: float) -> None:
        _fractions[number] = fraction

    return do_job(job, store, options, threads, progress)
