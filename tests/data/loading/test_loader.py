from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest
import torch

from data.loading.batches import BatchLayout
from data.loading.decode import part_bytes
from data.loading.decode_worker import ChildWorker, StartWorker
from data.loading.feed import Feed, FeedSpec, InlineFeed
from data.loading.loader import LoaderService
from data.loading.normalise import Normalisation
from data.loading.order import SampleStream
from data.loading.remote_feed import RemoteFeed
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart
from tests.data.loading.thread_worker import ThreadWorker
from tests.data.numbered_images import HEIGHT, WIDTH, BrokenImages, Images
from tests.fake_gpu import FakeGpu

SAMPLES, SEED = 7, 11
WHOLE = Box.of_size(HEIGHT, WIDTH)
BOXES = (Box(0, 20, 0, 53), Box(17, 37, 0, 53))  # two trainers whose parts overlap by a halo
WEIGHTS = (1.0, 0.0, 5.0, 1.0, 1.0, 2.0, 1.0)


def stream(weights: tuple[float, ...] | None = None) -> SampleStream:
    return SampleStream(SAMPLES, SEED, weights)


def replica_of(trainer: int, layout: BatchLayout) -> int:
    return trainer // len(BOXES) if layout.replicas > 1 else 0


def plain_parts(trainer: int, layout: BatchLayout) -> tuple[InputPart, ...]:
    return (InputPart(BOXES[trainer % len(BOXES)], 0, layout.batch_of(replica_of(trainer, layout))),)


def mirrored_parts(trainer: int, layout: BatchLayout) -> tuple[InputPart, ...]:
    """Three ranks, two directions: the first and the last are each other's mirror, the middle one needs no pixels."""
    half = layout.batch_of(0) // 2
    return {
        0: (InputPart(BOXES[0], 0, half), InputPart(BOXES[1], half, layout.batch_of(0))),
        1: (),
        2: (InputPart(WHOLE, 0, half),),
    }[trainer]


def spec_of(trainer: int, layout: BatchLayout, turns: tuple[int, int], parts=plain_parts, weights=None) -> FeedSpec:
    return FeedSpec(stream(weights), layout, replica_of(trainer, layout), parts(trainer, layout), turns)


def read_all(feed: Feed, spec: FeedSpec, turn: int) -> list[torch.Tensor]:
    pixels = feed.batch(turn)
    return [pixels.read(part.box, part.first, part.stop).clone() for part in spec.parts]


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def inline(trainer: int, layout: BatchLayout, turns: tuple[int, int], cache_bytes: int = 0, **how) -> list:
    spec = spec_of(trainer, layout, turns, **how)
    feed = InlineFeed(Images(), spec, cache_bytes)
    return [read_all(feed, spec, turn) for turn in range(*turns)]


def job(
    trainers: int,
    loaders: int,
    layout: BatchLayout,
    turns: tuple[int, int],
    images: Images,
    prefetch: int = 2,
    leave_after: int | None = None,
    start: StartWorker = ThreadWorker,
    cache_bytes: int = 0,
    **how,
) -> list:
    """Return what each trainer received and was told, and what each loader counted."""

    def body(comm: Communicator) -> object:
        if comm.rank >= trainers:
            order = stream(how.get("weights"))
            service = LoaderService(comm, range(trainers), images, order, layout, 2, cache_bytes, start)
            return service.serve(), service.counts
        spec = spec_of(comm.rank, layout, turns, **how)
        notice = partial(comm.poll_object, 999)  # raises when another rank has failed
        feed = RemoteFeed(comm, range(trainers, trainers + loaders), spec, prefetch, check_signals=notice)
        received = [read_all(feed, spec, turn) for turn in range(turns[0], leave_after or turns[1])]
        feed.close(stopped=leave_after is not None)
        return received, feed.reports

    return run_ranks(trainers + loaders, body)


@pytest.mark.parametrize("loaders", [1, 2, 4])
@pytest.mark.parametrize(
    ("trainers", "layout"),
    [(2, BatchLayout.uniform(3)), (4, BatchLayout.uniform(2, 2)), (4, BatchLayout((1, 2), rounds=2))],
)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_any_number_of_loaders_gives_what_inline_gives(loaders, trainers, layout, weights) -> None:
    results = job(trainers, loaders, layout, (0, 6), Images(), weights=weights)
    for trainer in range(trainers):
        assert same(results[trainer][0], inline(trainer, layout, (0, 6), weights=weights))
    assert all(result[0] is False for result in results[trainers:])


@pytest.mark.parametrize("loaders", [1, 3])
def test_mirrored_ranks_get_another_box_for_the_other_half(loaders: int) -> None:
    layout = BatchLayout.uniform(4)
    results = job(3, loaders, layout, (0, 5), Images(), parts=mirrored_parts)
    for trainer in range(3):
        assert same(results[trainer][0], inline(trainer, layout, (0, 5), parts=mirrored_parts))
    assert [len(turn) for turn in results[0][0]] == [2] * 5 and results[1][0] == [[]] * 5


def test_child_processes_give_what_threads_give() -> None:
    layout = BatchLayout.uniform(3)
    results = job(2, 1, layout, (0, 4), Images(), start=ChildWorker)
    assert all(same(results[trainer][0], inline(trainer, layout, (0, 4))) for trainer in range(2))
    assert results[2][1].samples == 12 and results[2][1].replaced == 0


def test_a_run_that_goes_on_gets_the_very_next_samples() -> None:
    layout = BatchLayout.uniform(2)
    straight = job(2, 1, layout, (0, 6), Images())
    resumed = job(2, 2, layout, (3, 6), Images())
    for trainer in range(2):
        assert same(straight[trainer][0][3:], resumed[trainer][0])


def test_parts_that_overlap_are_read_once_and_only_parts_travel() -> None:
    images = Images()
    results = job(2, 1, BatchLayout.uniform(3), (0, 4), images)
    assert results[2][0] is False and results[2][1].samples == 12
    assert [box for _, box in images.reads] == [WHOLE] * 12
    report = results[1][1][2]
    assert report["read_bytes"] == 12 * part_bytes(WHOLE)
    assert report["to_you_bytes"] == 12 * part_bytes(BOXES[1])
    assert report["sent_bytes"] == 12 * sum(part_bytes(box) for box in BOXES)


def test_each_node_reads_its_own_part_once() -> None:
    """Two nodes, a trainer and a loader on each: together they read the image and its halo, each its own."""
    layout, images = BatchLayout.uniform(2), [Images(), Images()]

    def body(comm: Communicator) -> list:
        if comm.rank >= 2:
            node = comm.rank - 2
            LoaderService(comm, [node], images[node], stream(), layout, workers=2, start=ThreadWorker).serve()
            return []
        spec = spec_of(comm.rank, layout, (0, 4))
        feed = RemoteFeed(comm, [2 + comm.rank], spec, prefetch=1)
        received = [read_all(feed, spec, turn) for turn in range(4)]
        feed.close(stopped=False)
        return received

    results = run_ranks(4, body)
    for trainer in range(2):
        assert same(results[trainer], inline(trainer, layout, (0, 4)))
        assert [box.height for _, box in images[trainer].reads] == [20] * 8


@pytest.mark.parametrize("kept", [SAMPLES, 5])
def test_the_cache_spares_reads_and_changes_nothing(kept: int) -> None:
    images, layout, cache_bytes = Images(), BatchLayout.uniform(2), kept * part_bytes(WHOLE)
    results = job(2, 1, layout, (0, 14), images, cache_bytes=cache_bytes)
    for trainer in range(2):
        assert same(results[trainer][0], inline(trainer, layout, (0, 14)))
        assert same(results[trainer][0], inline(trainer, layout, (0, 14), cache_bytes=cache_bytes))
    counts = results[2][1]
    assert counts.read_bytes == len(images.reads) * part_bytes(WHOLE)
    assert counts.samples - counts.cached == len(images.reads)
    assert counts.samples == 28
    most = 28 - SAMPLES  # fewer where the same image is asked for twice before it has been read once
    if kept == SAMPLES:
        assert most - 6 <= counts.cached <= most
    else:
        assert 0 < counts.cached < most


def test_a_slow_trainer_makes_loaders_wait_not_grow() -> None:
    images, layout, prefetch = Images(), BatchLayout.uniform(1), 2
    ahead: list[int] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            LoaderService(comm, [0], images, stream(), layout, workers=4, start=ThreadWorker).serve()
            return
        spec = spec_of(0, layout, (0, 12))
        feed = RemoteFeed(comm, [1], spec, prefetch)
        for turn in range(12):
            feed.batch(turn)
            time.sleep(0.05)
            ahead.append(len(images.reads) - (turn + 1))
        feed.close(stopped=False)

    run_ranks(2, body)
    assert max(ahead) <= prefetch
    assert ahead[0] == prefetch  # and it did read ahead


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_trainer_holds_as_many_parts_as_it_has_asked_for(prefetch: int) -> None:
    def body(comm: Communicator) -> int:
        layout = BatchLayout.uniform(2)
        if comm.rank == 1:
            LoaderService(comm, [0], Images(), stream(), layout, workers=1, start=ThreadWorker).serve()
            return 0
        feed = RemoteFeed(comm, [1], spec_of(0, layout, (0, 3)), prefetch)
        feed.close(stopped=True)
        return sum(buffer.numel() for slot in feed._slots for buffer in slot.buffers)

    assert run_ranks(2, body)[0] == (prefetch + 1) * 2 * part_bytes(BOXES[0])


def test_trainers_that_drift_apart_block_nobody() -> None:
    """One trainer asks for five turns at a time, the other for two, and is slow: slots must come free all the same."""
    layout, images = BatchLayout.uniform(1), Images()

    def body(comm: Communicator) -> list:
        if comm.rank == 2:
            LoaderService(comm, range(2), images, stream(), layout, workers=1, start=ThreadWorker).serve()
            return []
        spec = spec_of(comm.rank, layout, (0, 12))
        feed = RemoteFeed(comm, [2], spec, prefetch=4 if comm.rank == 0 else 1)
        received = []
        for turn in range(12):
            received.append(read_all(feed, spec, turn))
            time.sleep(0.02 * comm.rank)
        feed.close(stopped=False)
        return received

    results = run_ranks(3, body)
    assert all(same(results[trainer], inline(trainer, layout, (0, 12))) for trainer in range(2))
    assert len(images.reads) == 12


def test_leaving_early_does_not_wait_for_what_was_asked() -> None:
    images = Images(delay_s=0.3)
    results = job(2, 1, BatchLayout.uniform(4), (0, 100), images, prefetch=8, leave_after=1)
    assert results[2][0] is True
    assert len(images.reads) < 30  # of 36 that were asked for: two workers read one in 0.3 s


def test_waiting_is_measured() -> None:
    def body(comm: Communicator) -> float:
        images, layout = Images(delay_s=0.1), BatchLayout.uniform(1)
        if comm.rank == 1:
            LoaderService(comm, [0], images, stream(), layout, workers=1, start=ThreadWorker).serve()
            return 0.0
        feed = RemoteFeed(comm, [1], spec_of(0, layout, (0, 5)), prefetch=1)
        for turn in range(5):
            feed.batch(turn)
        feed.close(stopped=False)
        return feed.wait_s

    assert 0.4 < run_ranks(2, body)[0] < 2.0


def test_a_sample_that_cannot_be_read_ends_all() -> None:
    with pytest.raises(OSError, match="cannot be decoded") as caught:
        job(2, 1, BatchLayout.uniform(3), (0, 6), BrokenImages())
    assert "in vary" in caught.value.__notes__[0]


def test_a_feed_refuses_what_the_loader_does_not_send() -> None:
    def body(comm: Communicator) -> None:
        layout = BatchLayout.uniform(1)
        if comm.rank == 1:
            LoaderService(comm, [0], Images(), stream(), layout, workers=1, start=ThreadWorker).serve()
            return
        feed = RemoteFeed(comm, [1], spec_of(0, layout, (0, 2)), prefetch=1)
        with pytest.raises(ValueError, match="turn 1 was requested, but turn 0 is next"):
            feed.batch(1)
        pixels = feed.batch(0)
        with pytest.raises(ValueError, match="loaders send"):
            pixels.read(WHOLE, 0, 1)
        with pytest.raises(ValueError, match="of samples 0 to 2"):
            pixels.read(Box(2, 5, 1, 4), 0, 2)
        assert pixels.read(Box(2, 5, 1, 4), 0, 1).shape == (1, 3, 3, 3)
        feed.close(stopped=True)

    run_ranks(2, body)


@pytest.mark.cuda
def test_on_a_gpu_images_arrive_from_pinned_memory() -> None:
    layout = BatchLayout.uniform(3)

    def body(comm: Communicator) -> list:
        if comm.rank == 1:
            LoaderService(comm, [0], Images(), stream(), layout, workers=2, start=ThreadWorker).serve()
            return []
        spec = spec_of(0, layout, (0, 8))
        feed = RemoteFeed(comm, [1], spec, prefetch=1, device="cuda")
        received = []
        for turn in range(8):
            images = feed.batch(turn).read(BOXES[0], 0, 3)
            assert images.is_cuda
            torch.cuda._sleep(10_000_000)  # kernels lag behind: buffers may not be overwritten before they were copied
            received.append([images.clone()])
        feed.close(stopped=False)
        return [[image.cpu() for image in turn] for turn in received]

    assert same(run_ranks(2, body)[0], inline(0, layout, (0, 8)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prefetch", [1, 3])
def test_copies_to_a_gpu_run_ahead_in_any_order(prefetch: int, seed: int) -> None:
    layout = BatchLayout.uniform(3)

    def body(comm: Communicator) -> list:
        if comm.rank == 1:
            LoaderService(comm, [0], Images(), stream(), layout, workers=2, start=ThreadWorker).serve()
            return []
        feed = RemoteFeed(comm, [1], spec_of(0, layout, (0, 8)), prefetch, device="cuda")
        received = []
        for turn in range(8):
            with gpu.no_synchronisation() if turn == 0 else contextlib.nullcontext():
                images = feed.batch(turn).read(BOXES[0], 0, 3)
                assert images.is_cuda
                received.append([images.clone()])
        feed.close(stopped=False)
        return [[image.cpu() for image in turn] for turn in received]

    with FakeGpu(seed) as gpu:
        found = run_ranks(2, body)[0]
    assert same(found, inline(0, layout, (0, 8)))


def test_pixels_on_a_gpu_are_normalised_alike() -> None:
    pixels, norm = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8), Normalisation((0.5, 0.4, 0.2))
    orders = (torch.contiguous_format, torch.channels_last)
    expected = [norm(pixels, memory_format=order) for order in orders]
    with FakeGpu() as gpu:
        there = pixels.to("cuda")
        norm(there)  # copies its constants
        for order, wanted in zip(orders, expected, strict=True):
            with gpu.no_synchronisation():
                found = norm(there, memory_format=order)
            assert found.is_cuda and found.is_contiguous(memory_format=order)
            assert torch.allclose(found.cpu(), wanted, rtol=0, atol=1e-6)  # one kernel rounds once


def test_normalisation_is_that_of_the_formula() -> None:
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    norm = Normalisation((0.5, 0.4, 0.3), (0.2, 0.1, 0.3))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (norm.mean, norm.std))
    expected = (pixels.double() / 255 - mean) / std
    assert torch.allclose(norm(pixels, torch.float64), expected, rtol=1e-13, atol=1e-13)
    last = norm(pixels, memory_format=torch.channels_last)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(last.double(), expected, atol=1e-5)
    assert Normalisation.from_json(norm.to_json()) == norm
