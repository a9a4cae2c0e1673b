from __future__ import annotations

import random
import time
from functools import partial

import pytest
import torch

from data.loading.batches import BatchLayout
from data.loading.cell_feed import CellFeed
from data.loading.decode import part_bytes
from data.loading.decode_pool import Counts
from data.loading.decode_worker import ChildWorker
from data.loading.feed import FeedSpec, InlineFeed
from data.loading.loader import LoaderService
from data.loading.order import SampleStream
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from tests.data.loading.thread_worker import ThreadWorker
from tests.data.numbered_images import HEIGHT, WIDTH, Images

HALVES = (0, 27), (25, 53)  # columns of two trainers that share each image, with a halo
ROWS = (0, 14), (11, 26), (22, 37), (37, 37)  # of cells; the last has no pixels


def parts_of(trainer: int, batch: int, microbatches: int = 1) -> tuple[InputPart, ...]:
    """The boxes of a turn, micro-batch after micro-batch, in the order of the cells."""
    x0, x1 = HALVES[trainer % len(HALVES)]
    size = batch // microbatches
    return tuple(
        InputPart(Box(y0, y1, x0, x1), k * size, (k + 1) * size) for k in range(microbatches) for y0, y1 in ROWS
    )


def spec_of(trainer: int, layout: BatchLayout, turns: tuple[int, int], microbatches: int = 1) -> FeedSpec:
    replica = trainer // len(HALVES) if layout.replicas > 1 else 0
    parts = parts_of(trainer, layout.batch_of(replica), microbatches)
    return FeedSpec(SampleStream(7, seed=11), layout, replica, parts, turns)


def read_all(feed, parts, turn: int) -> list[torch.Tensor]:
    pixels = feed.batch(turn)
    return [pixels.read(part.box, part.first, part.stop).clone() for part in parts]


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def inline(spec: FeedSpec) -> list[list[torch.Tensor]]:
    feed = InlineFeed(Images(), spec)
    return [read_all(feed, spec.parts, turn) for turn in range(*spec.turns)]


def serve(comm: Communicator, trainers: int, layout: BatchLayout, images: Images, **options) -> Counts:
    given = {"workers": 2, "start": ThreadWorker} | options
    service = LoaderService(comm, range(trainers), images, SampleStream(7, seed=11), layout, **given)
    service.serve()
    return service.counts


def job(trainers: int, loaders: int, layout: BatchLayout, images: Images, microbatches: int = 1, **options) -> list:
    """Return what each trainer received, and what each loader counted."""

    def body(comm: Communicator) -> object:
        if comm.rank >= trainers:
            return serve(comm, trainers, layout, images, **options)
        spec = spec_of(comm.rank, layout, (0, 5), microbatches)
        notice = partial(comm.poll_object, 999)  # raises when another rank has failed
        feed = CellFeed(comm, range(trainers, trainers + loaders), spec, 2, check_signals=notice)
        received = [read_all(feed, spec.parts, turn) for turn in range(5)]
        feed.close(stopped=False)
        assert len(feed.reports) == loaders
        return received

    return run_ranks(trainers + loaders, body)


@pytest.mark.parametrize("loaders", [1, 2, 3])
@pytest.mark.parametrize(
    ("trainers", "layout", "microbatches"),
    [(2, BatchLayout.uniform(1), 1), (2, BatchLayout.uniform(4), 2), (4, BatchLayout((1, 2), rounds=2), 2)],
)
@pytest.mark.parametrize("cache_bytes", [0, 40_000])
def test_cells_get_what_inline_gives(loaders, trainers, layout, microbatches, cache_bytes) -> None:
    results = job(trainers, loaders, layout, Images(), microbatches, cache_bytes=cache_bytes)
    for trainer in range(trainers):
        assert same(results[trainer], inline(spec_of(trainer, layout, (0, 5), microbatches)))
    assert sum(counts.samples for counts in results[trainers:]) == 5 * layout.turn_samples  # not boxes


def test_child_processes_send_the_same_boxes() -> None:
    layout = BatchLayout.uniform(2)
    received, counts = job(1, 1, layout, Images(), start=ChildWorker)
    assert same(received, inline(spec_of(0, layout, (0, 5)))) and counts.samples == 10


def test_only_the_boxes_are_read_and_held() -> None:
    """A slot has the pixels of a box, not those of a sample; without a cache each box is read by itself."""
    images, layout = Images(), BatchLayout.uniform(1)
    slots: list[int] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            service = LoaderService(comm, [0], images, SampleStream(7, seed=11), layout, 1, start=ThreadWorker)
            service.serve()
            assert service._pool is not None
            slots.append(service._pool._memory.slots.array.size)
            return
        spec = spec_of(0, layout, (0, 2))
        feed = CellFeed(comm, [1], spec, prefetch=2, ahead_bytes=1)
        for turn in range(2):
            read_all(feed, spec.parts, turn)
        feed.close(stopped=False)

    run_ranks(2, body)
    largest = max(part_bytes(part.box) for part in parts_of(0, 1))
    assert slots == [3 * largest]  # two ahead, and one that is read
    assert len(images.reads) == 6 and {box.shape for _, box in images.reads} == {(14, 27), (15, 27)}


@pytest.mark.parametrize("boxes", [2, 5])
def test_no_more_is_requested_than_may_be_ahead(boxes: int) -> None:
    images, layout = Images(), BatchLayout.uniform(1)
    ahead: list[int] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            serve(comm, 1, layout, images, workers=4)
            return
        spec = spec_of(0, layout, (0, 4))
        feed = CellFeed(comm, [1], spec, prefetch=2, ahead_bytes=boxes * 15 * 27 * 3)
        read = 0
        for turn in range(4):
            pixels = feed.batch(turn)
            for part in spec.parts[:3]:
                pixels.read(part.box, part.first, part.stop)
                read += 1
                while not ahead and len(images.reads) < read + boxes:
                    time.sleep(0.01)  # the loader works while this rank does
                time.sleep(0.03)
                ahead.append(len(images.reads) - read)
        feed.close(stopped=False)

    run_ranks(2, body)
    assert max(ahead) == boxes == ahead[0]  # it reads ahead, across turns, too


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_reading_gives_the_same(seed: int) -> None:
    """Boxes that are read in another order, twice or not at all: nothing is lost, mixed up or stuck."""
    layout = BatchLayout.uniform(2)

    def body(comm: Communicator) -> None:
        if comm.rank >= 2:
            serve(comm, 2, layout, Images(delay_s=0.001))
            return
        drawn = random.Random(seed * 10 + comm.rank)
        spec = spec_of(comm.rank, layout, (3, 9), microbatches=2)
        feed = CellFeed(
            comm, [2, 3], spec, 1, drawn.choice([None, 1, 4000]), check_signals=partial(comm.poll_object, 999)
        )
        plain = InlineFeed(Images(), spec)
        for turn in range(3, 9):
            pixels, wanted = feed.batch(turn), plain.batch(turn)
            for part in drawn.choices(spec.parts, k=drawn.randrange(12)):
                given = pixels.read(part.box, part.first, part.stop)
                assert torch.equal(given, wanted.read(part.box, part.first, part.stop))
        feed.close(stopped=False)

    run_ranks(4, body)


def test_leaving_early_ends_loaders_and_trainers_that_read_on() -> None:
    layout = BatchLayout.uniform(1)

    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            serve(comm, 2, layout, Images(delay_s=0.01))
            return
        spec = spec_of(comm.rank, layout, (0, 6))
        feed = CellFeed(comm, [2], spec, 2, check_signals=partial(comm.poll_object, 999))
        feed.batch(0).read(spec.parts[0].box, 0, 1)
        if comm.rank == 1:
            for turn in range(1, 6):
                read_all(feed, spec.parts, turn)
        feed.close(stopped=comm.rank == 0)

    run_ranks(3, body)


def test_what_loaders_do_not_send_is_refused() -> None:
    def body(comm: Communicator) -> None:
        layout = BatchLayout.uniform(1)
        if comm.rank == 1:
            serve(comm, 1, layout, Images())
            return
        spec = spec_of(0, layout, (0, 2))
        feed = CellFeed(comm, [1], spec, prefetch=1)
        with pytest.raises(ValueError, match="turn 1 was requested, but turn 0 is next"):
            feed.batch(1)
        pixels = feed.batch(0)
        with pytest.raises(ValueError, match="was requested, but the loaders send"):
            pixels.read(Box.of_size(HEIGHT, WIDTH), 0, 1)
        assert pixels.read(Box(37, 37, 0, 27), 0, 1).shape == (1, 3, 0, 27)
        feed.close(stopped=True)

    run_ranks(2, body)
