from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch

from data.batches import BatchLayout
from data.feed import Feed, InlineFeed, RemoteFeed, Share
from data.loader import LoaderService
from data.normalise import Normalisation
from data.order import SampleStream
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.box import Box

HEIGHT, WIDTH, SAMPLES, SEED = 37, 53, 7, 11
BOXES = (Box(0, 20, 0, 53), Box(17, 37, 0, 53))  # two trainers whose parts overlap by a halo


class Images:
    """Images in memory whose pixels say which sample, epoch and place they are; counts what is read."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.reads: list[tuple[int, Box, int | None]] = []
        self._delay_s = delay_s
        self._lock = threading.Lock()

    def read(self, index: int, box: Box, epoch: int | None = None) -> npt.NDArray[np.uint8]:
        time.sleep(self._delay_s)
        with self._lock:
            self.reads.append((index, box, epoch))
        rng = np.random.default_rng([index, 0 if epoch is None else epoch])
        rows, columns = box.slices()
        return rng.integers(0, 256, (3, HEIGHT, WIDTH), np.uint8)[:, rows, columns]


class BrokenImages(Images):
    def read(self, index: int, box: Box, epoch: int | None = None) -> npt.NDArray[np.uint8]:
        if epoch == 1:
            raise OSError("chunk c/0/1/2 cannot be decoded")
        return super().read(index, box, epoch)


def consume(feed: Feed, share: Share, turns: range) -> list[torch.Tensor]:
    return [feed.batch(turn)(share.box).clone() for turn in turns]


def share_of(trainer: int, layout: BatchLayout, turns: tuple[int, int]) -> Share:
    replica = trainer // len(BOXES) if layout.replicas > 1 else 0
    return Share(SampleStream(SAMPLES, SEED), layout, replica, BOXES[trainer % len(BOXES)], turns)


def inline(trainer: int, layout: BatchLayout, turns: tuple[int, int]) -> list[torch.Tensor]:
    share = share_of(trainer, layout, turns)
    return consume(InlineFeed(Images(), share), share, range(*turns))


def job(
    trainers: int,
    loaders: int,
    layout: BatchLayout,
    turns: tuple[int, int],
    images: Images,
    prefetch: int = 2,
    leave_after: int | None = None,
    pause_s: float = 0.0,
) -> list[object]:
    def body(comm: Communicator) -> object:
        if comm.rank >= trainers:
            stream = SampleStream(SAMPLES, SEED)
            service = LoaderService(comm, range(trainers), images, stream, layout, workers=2)
            return service.serve(), service.read_samples
        share = share_of(comm.rank, layout, turns)
        notice = partial(comm.poll_object, 999)  # raises when another rank has failed
        feed = RemoteFeed(comm, range(trainers, trainers + loaders), share, prefetch, notice)
        received = []
        for turn in range(turns[0], turns[1] if leave_after is None else leave_after):
            time.sleep(pause_s)
            received.append(feed.batch(turn)(share.box).clone())
        feed.close(stopped=leave_after is not None)
        return received

    return run_ranks(trainers + loaders, body, timeout_s=60)


@pytest.mark.parametrize("loaders", [1, 2, 4])
@pytest.mark.parametrize(("trainers", "layout"), [(2, BatchLayout(3)), (4, BatchLayout(2, replicas=2))])
def test_any_number_of_loaders_gives_what_inline_gives(loaders: int, trainers: int, layout: BatchLayout) -> None:
    results = job(trainers, loaders, layout, (0, 6), Images())
    for trainer in range(trainers):
        expected = inline(trainer, layout, (0, 6))
        assert all(torch.equal(a, b) for a, b in zip(results[trainer], expected, strict=True))
    assert all(result[0] is False for result in results[trainers:])


def test_a_run_that_goes_on_gets_the_very_next_samples() -> None:
    layout = BatchLayout(2)
    straight = job(2, 1, layout, (0, 6), Images())
    resumed = job(2, 2, layout, (3, 6), Images())
    for trainer in range(2):
        assert all(torch.equal(a, b) for a, b in zip(straight[trainer][3:], resumed[trainer], strict=True))


def test_parts_that_overlap_are_read_once() -> None:
    images = Images()
    results = job(2, 1, BatchLayout(3), (0, 4), images)
    assert results[2] == (False, 12)
    assert len(images.reads) == 12
    assert {box for _, box, _ in images.reads} == {Box(0, 37, 0, 53)}


def test_a_slow_trainer_makes_loaders_wait_not_grow() -> None:
    images, layout, prefetch = Images(), BatchLayout(1), 2
    ahead: list[int] = []

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            LoaderService(comm, [0], images, SampleStream(SAMPLES, SEED), layout, workers=4).serve()
            return
        share = share_of(0, layout, (0, 12))
        feed = RemoteFeed(comm, [1], share, prefetch)
        for turn in range(12):
            feed.batch(turn)
            time.sleep(0.05)
            ahead.append(len(images.reads) - (turn + 1))
        feed.close(stopped=False)

    run_ranks(2, body, timeout_s=60)
    assert max(ahead) <= prefetch
    assert ahead[0] == prefetch  # and it did read ahead


def test_leaving_early_does_not_wait_for_what_was_asked() -> None:
    images = Images(delay_s=0.3)
    start = time.monotonic()
    results = job(2, 1, BatchLayout(4), (0, 100), images, prefetch=8, leave_after=1)
    assert results[2][0] is True
    assert time.monotonic() - start < 4  # all that was asked for: 36 samples of 0.3 s by two workers = 5.4 s
    assert len(images.reads) < 20


def test_waiting_is_measured() -> None:
    def body(comm: Communicator) -> float:
        images, layout = Images(delay_s=0.1), BatchLayout(1)
        if comm.rank == 1:
            LoaderService(comm, [0], images, SampleStream(SAMPLES, SEED), layout, workers=1).serve()
            return 0.0
        feed = RemoteFeed(comm, [1], share_of(0, layout, (0, 5)), prefetch=1)
        for turn in range(5):
            feed.batch(turn)
        feed.close(stopped=False)
        return feed.wait_s

    assert 0.4 < run_ranks(2, body)[0] < 2.0


def test_a_sample_that_cannot_be_read_ends_all() -> None:
    with pytest.raises(OSError, match="cannot be decoded"):
        job(2, 1, BatchLayout(3), (0, 6), BrokenImages())


def test_a_feed_refuses_what_the_loader_does_not_send() -> None:
    def body(comm: Communicator) -> None:
        layout = BatchLayout(1)
        if comm.rank == 1:
            LoaderService(comm, [0], Images(), SampleStream(SAMPLES, SEED), layout, workers=1).serve()
            return
        feed = RemoteFeed(comm, [1], share_of(0, layout, (0, 2)), prefetch=1)
        with pytest.raises(ValueError, match="turns must follow"):
            feed.batch(1)
        pixels = feed.batch(0)
        with pytest.raises(ValueError, match="loaders send"):
            pixels(Box(0, 37, 0, 53))
        assert pixels(Box(2, 5, 1, 4)).shape == (1, 3, 3, 3)
        feed.close(stopped=True)

    run_ranks(2, body)


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
