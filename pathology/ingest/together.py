"""Ingest by the ranks of a job: slides are dealt, each rank ingests its own, one manifest is compiled at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data.cores import ranks_with_these_cores, usable_cores
from data.store.manifest import SlideRecord
from hyfi_core.comm.base import Communicator
from pathology.dealing import SlideQueue, gathered, on_first_rank, own_group, shared_folder
from pathology.ingest.archive import IngestReport, IngestWork, Request, begin, end, refresh, store_errors
from pathology.ingest.discover import SlideJob
from pathology.ingest.pool import SlidePool
from pathology.ingest.work import Outcome
from pathology.memory import worker_count
from pathology.readers.threads import set_decode_threads

_LOOK_EVERY_S = 2.0
"""Seconds between two checks of the slides that other ranks have finished."""


def ingest_together(
    request: Request,
    work: IngestWork | None,
    comm: Communicator,
    *,
    workers: int = 0,
    memory_bytes: int | None = None,
    finished: Callable[[Outcome], None] = lambda outcome: None,
    progress: Callable[[Sequence[float]], None] = lambda fractions: None,
    stop_wanted: Callable[[], bool] = lambda: False,
) -> IngestReport:
    """Ingest slides into one store with all ranks, and compile its manifest. Collective.

    Each slide goes to the rank that is free first. A slide that fails does not affect others.

    Args:
        request: What to ingest; the same on every rank.
        work: On rank 0 the result of `compare_with_store`; ignored on other ranks.
        comm: The ranks; they share the file system of slides and store.
        workers: Number of processes of each rank; 0: as many as its share of its node's cores and memory allows.
        memory_bytes: Memory of all processes of a rank together; None: its share of its node's free memory.
        finished: Called with the result of each slide of this rank.
        progress: Called on rank 0 with the completed fraction of each job; 1 if another rank has finished it.
        stop_wanted: Called often on every rank; if it returns True, the rank stops its slides at once.

    Returns:
        The report of all ranks, the same on each.

    Raises:
        RequestError: On every rank: the store cannot be written, or the memory is too small.
    """
    store = request.store
    jobs, done_before = _shared_jobs(request, work, comm)
    # A collective call, so it must come before anything that a single rank may refuse.
    mates = ranks_with_these_cores(comm)
    cores, processes = max(1, usable_cores() // mates), worker_count(workers, memory_bytes, mates)
    set_decode_threads(cores)
    report = IngestReport()
    with shared_folder(store / "dealt", comm) as folder:
        each_rank = own_group(comm, 1)  # the queue deals slides to groups of ranks: here each rank is a group
        queue = SlideQueue(range(len(jobs)), folder, each_rank, alone=comm.size == 1)
        share = _Share(jobs, queue, comm.rank == 0, finished, progress, stop_wanted)
        pool = SlidePool(store, request.options, processes, share.finish, share.show_progress, share.take, cores)
        try:
            with store_errors(report, store):
                if work is not None and comm.rank == 0:
                    refresh(work.finished, store)
                pool.run(jobs)
        except KeyboardInterrupt:
            report.interrupted = True
        # A collective call inside the folder's context: the folder is removed only after all ranks have come here.
        outcomes = gathered(comm, leads=True, results=share.outcomes)
        ends = comm.broadcast_object(comm.gather_objects([report.stopped, report.interrupted]))
    if comm.rank == 0:
        end(store)
    comm.barrier()  # no rank returns before the manifest is complete
    return _report(outcomes, done_before, ends, len(jobs))


def _shared_jobs(request: Request, work: IngestWork | None, comm: Communicator) -> tuple[list[SlideJob], list[str]]:
    """Begin on rank 0, which also decides what is left to do; return (jobs, names of finished slides). Collective."""

    def jobs_left() -> list[Any]:
        assert work is not None, "rank 0 has compared"
        begun = begin(request, work)
        return [[job.to_json() for job in begun.jobs], list(begun.finished)]

    jobs, done_before = on_first_rank(comm, jobs_left)
    return [SlideJob.of_json(values) for values in jobs], done_before


def _report(outcomes: list[Any], done_before: list[str], ends: list[Any], jobs: int) -> IngestReport:
    """Return the report of all ranks together.

    Args:
        outcomes: (record, job, whether this run ingested it) of each slide, as JSON.
        done_before: Names of slides that were skipped.
        ends: (why the rank stopped, whether it was interrupted) of each rank.
        jobs: Number of jobs of the run.
    """
    report = IngestReport(skipped=done_before)
    for values, job, ours in outcomes:
        report.add(Outcome(SlideRecord.of_json(values), SlideJob.of_json(job), ours))
    report.stopped = next((stopped for stopped, _ in ends if stopped), "")
    report.interrupted = any(interrupted for _, interrupted in ends) and len(outcomes) < jobs
    return report


@dataclass
class _Share:
    """The work of one rank: takes slides from the queue, and reports what this and other ranks have finished.

    Attributes:
        jobs: The jobs of all ranks.
        queue: Their indices, dealt to ranks.
        shows_progress: Whether this rank shows the progress of all ranks.
        finished: Called with the result of each slide of this rank.
        progress: Called with the completed fraction of each job, if ``shows_progress``.
        stop_wanted: Whether the rank should stop its slides at once.
        outcomes: Index of a job -> its result as JSON, for this rank's slides.
    """

    jobs: Sequence[SlideJob]
    queue: SlideQueue
    shows_progress: bool
    finished: Callable[[Outcome], None]
    progress: Callable[[Sequence[float]], None]
    stop_wanted: Callable[[], bool]
    outcomes: dict[int, Any] = field(default_factory=dict)
    # Jobs that any rank has finished, as of the last check, and the time of this check.
    _done: set[int] = field(default_factory=set)
    _looked_s: float = 0.0

    def take(self) -> int | None:
        """Return the index of this rank's next job; None if all are taken."""
        self._stop_if_wanted()
        return self.queue.take()

    def finish(self, outcome: Outcome) -> None:
        """Keep and report the result of a slide of this rank."""
        # By place: the job may have got another name, because another run had taken its own.
        index = next(k for k, job in enumerate(self.jobs) if job.place == outcome.job.place)
        self.outcomes[index] = [asdict(outcome.record), outcome.job.to_json(), outcome.ours]
        self.queue.finish(index)
        self.finished(outcome)

    def show_progress(self, fractions: Sequence[float]) -> None:
        """Show the progress of this rank's slides, and which slides other ranks have finished."""
        self._stop_if_wanted()
        now_s = time.monotonic()
        if not self.shows_progress:
            return
        if now_s - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = now_s
            self._done |= self.queue.newly_finished()
        self.progress([1.0 if k in self._done else fraction for k, fraction in enumerate(fractions)])

    def _stop_if_wanted(self) -> None:
        if self.stop_wanted():
            # As if by Ctrl-C: the pool ends its workers, and slides that were begun can be resumed.
            raise KeyboardInterrupt
