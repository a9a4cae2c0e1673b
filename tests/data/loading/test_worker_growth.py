"""More decoding workers while trainers wait: when, how many, and that pixels and their order stay the same."""

from __future__ import annotations

import threading
from functools import partial

import torch

from data.loading.batches import BatchLayout
from data.loading.decode_worker import Memory, StartWorker
from data.loading.feed import Feed, FeedSpec, InlineFeed
from data.loading.loader import LoaderService
from data.loading.order import SampleStream
from data.loading.remote_feed import RemoteFeed
from data.loading.worker_growth import LATE_TURNS, RECENT_TURNS, WorkerGrowth
from data.tiles.rows import BagRows
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from tests.data.loading.thread_worker import ThreadWorker
from tests.data.numbered_images import HEIGHT, WIDTH, Images, Pixels

BATCH, TURNS, MOST = 4, 9, 3
PART = InputPart(Box.of_size(HEIGHT, WIDTH), 0, BATCH)
LAYOUT = BatchLayout.uniform(BATCH)
ORDER = SampleStream(BATCH * TURNS, seed=11)
TURN_OF = {ORDER.at(number)[1]: number // BATCH for number in range(BATCH * TURNS)}
PLENTY = 10**12


class LateImages(Images):
    """Images of a turn that cannot be read before a trainer waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._needed, self._changed = -1, threading.Condition()

    def needed(self, turn: int) -> None:
        """Let the images be read that come up to this turn."""
        with self._changed:
            self._needed = max(self._needed, turn)
            self._changed.notify_all()

    def read_plain(self, index: int, box: Box) -> Pixels:
        with self._changed:
            assert self._changed.wait_for(lambda: TURN_OF[index] <= self._needed, 60)
        return super().read_plain(index, box)


def spec() -> FeedSpec:
    return FeedSpec(ORDER, LAYOUT, 0, (PART,), (0, TURNS))


def batch(feed: Feed, turn: int) -> torch.Tensor:
    return feed.batch(turn).read(PART.box, 0, BATCH).clone()


def served(
    growth: WorkerGrowth | None, is_late: bool, start: StartWorker = ThreadWorker
) -> tuple[list[torch.Tensor], int]:
    """Return what a trainer received of a loader that begins with one worker, and how many it had in the end."""
    images = LateImages() if is_late else Images()

    def body(comm: Communicator) -> list[torch.Tensor] | int:
        if comm.rank == 1:
            service = LoaderService(comm, [0], images, ORDER, LAYOUT, 1, start=start, growth=growth)
            service.serve()
            return service.counts.workers
        now = [0]

        def waiting() -> None:
            comm.poll_object(999)  # raises when the loader has failed
            if isinstance(images, LateImages):
                images.needed(now[0])

        feed, received = RemoteFeed(comm, [1], spec(), 2, check_signals=waiting), []
        for now[0] in range(TURNS):
            received.append(batch(feed, now[0]))
        feed.close(stopped=False)
        assert feed.reports[1]["workers"] >= 1
        return received

    received, workers = run_ranks(2, body)
    return received, workers


def inline() -> list[torch.Tensor]:
    feed = InlineFeed(Images(), spec(), 0)
    return [batch(feed, turn) for turn in range(TURNS)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_trainers_that_wait_get_more_workers_and_the_same_batches() -> None:
    rises: list[int] = []
    growth = WorkerGrowth(MOST, lambda workers, most: rises.append(workers), free_bytes=lambda: PLENTY)
    received, workers = served(growth, is_late=True)
    assert rises == list(range(2, workers + 1)) and 2 <= workers <= MOST
    assert same(received, inline())


def test_without_growth_the_number_stays() -> None:
    received, workers = served(None, is_late=True)
    assert workers == 1 and same(received, inline())


class Eager(WorkerGrowth):
    """One more worker whenever there may be one."""

    def is_due(self, workers: int, image_bytes: int) -> bool:
        return workers < self.most


def test_workers_that_join_at_any_moment_change_no_batch() -> None:
    received, workers = served(Eager(6), is_late=False)
    assert workers > 1 and same(received, inline())


def test_no_more_workers_than_slots() -> None:
    growth = Eager(100)
    workers = served(growth, is_late=False)[1]
    assert growth.most == 3 * BATCH and workers <= growth.most  # two turns ahead, and the current one


class LackingProcesses:
    """Starts one worker, and no more."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, memory: Memory) -> ThreadWorker:
        self.asked += 1
        if self.asked > 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return ThreadWorker(memory)


def test_a_worker_that_cannot_be_started_is_told_once_and_the_others_go_on() -> None:
    start, failures = LackingProcesses(), []
    growth = Eager(6, on_failure=lambda workers, error: failures.append((workers, error.strerror)))
    received, workers = served(growth, is_late=True, start=start)
    assert workers == 1 and start.asked == 2 and same(received, inline())
    assert failures == [(1, "Resource temporarily unavailable")]


def late(growth: WorkerGrowth, times: int, trainer: int = 0) -> None:
    for _ in range(times):
        growth.turn(trainer, late=True)


def test_a_worker_is_due_after_late_turns_of_one_trainer_and_counts_begin_anew() -> None:
    rises: list[int] = []
    growth = WorkerGrowth(4, lambda workers, most: rises.append(workers), free_bytes=lambda: PLENTY)
    due = partial(growth.is_due, image_bytes=1)
    late(growth, LATE_TURNS - 1)
    late(growth, LATE_TURNS - 1, trainer=1)  # of the same turns
    assert not due(1)
    late(growth, 1)
    assert due(1)
    growth.grown(2)
    assert rises == [2] and not due(2)
    late(growth, LATE_TURNS)
    assert due(3) and not due(4)


def test_none_is_due_where_memory_is_short() -> None:
    growth = WorkerGrowth(4, free_bytes=lambda: 10**9)
    late(growth, LATE_TURNS)
    assert growth.is_due(1, 10**7) and not growth.is_due(1, 10**9)


def test_what_a_worker_keeps_needs_memory() -> None:
    growth = WorkerGrowth(4, worker_kept_bytes=BagRows.kept_bytes, free_bytes=lambda: 10**9)
    late(growth, LATE_TURNS)
    assert BagRows.kept_bytes == 2**27 and not growth.is_due(1, 10**7)


def test_free_memory_is_asked_for_at_most_once_a_second_while_it_is_short() -> None:
    now_s, looks = [0.0], []

    def free_bytes() -> int:
        looks.append(now_s[0])
        return 0 if now_s[0] < 2 else PLENTY

    growth = WorkerGrowth(4, free_bytes=free_bytes, clock=lambda: now_s[0])
    late(growth, LATE_TURNS)
    due = []
    for now_s[0] in (0.0, 0.5, 0.9, 1.0, 1.5, 2.0):
        due.append(growth.is_due(1, 1))
    assert due == [False] * 5 + [True] and looks == [0.0, 1.0, 2.0]


def test_late_turns_of_long_ago_do_not_count() -> None:
    growth = WorkerGrowth(4, free_bytes=lambda: PLENTY)
    for _ in range(LATE_TURNS):
        assert not growth.is_due(1, 1)
        late(growth, 1)
        for _ in range(RECENT_TURNS // 2 - 1):
            growth.turn(0, late=False)
    assert not growth.is_due(1, 1)
    late(growth, 2)
    assert growth.is_due(1, 1)
