"""Ranks of one image that are given different images are refused, on every rank, in the first steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core import Box, ParallelPlan, RequestError
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks

SHAPE = (2, 3, 32, 40)
LABELS = torch.tensor([0, 1])
Given = Callable[[torch.Tensor, int], object]


def network(kernel: int = 3) -> nn.Module:
    torch.manual_seed(0)
    stride = 2 if kernel == 3 else kernel
    return nn.Sequential(
        nn.Conv2d(3, 4, kernel, stride, kernel % 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def errors(plan: ParallelPlan, given: Given, calls: int = 1, kernel: int = 3) -> list[str]:
    """Return what each rank raises in some calls, "" if nothing; ``given`` returns the images of a rank."""
    models = [network(kernel) for _ in range(plan.ranks)]
    images = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1))

    def body(comm: Communicator) -> str:
        engine = hyfi_core.parallelize(models[comm.rank], SHAPE, plan, comm, verify=False)
        try:
            for call in range(calls):
                engine.accumulate(given(images, comm.rank) if call == calls - 1 else images, LABELS)
        except RequestError as error:
            return str(error)
        return ""

    return list(run_ranks(plan.ranks, body, 120))


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(grids=((1, 2),)),
        ParallelPlan(grids=((2, 2),), fused_halo=1),
        ParallelPlan(grids=((1, 2), (1, 1)), cuts=("0",), microbatches=2),
        ParallelPlan(grids=((2, 1), (2, 1)), cuts=("0",), microbatches=2, schedule="gems_master"),
        ParallelPlan(grids=((1, 2),), replicas=2),
    ],
)
def test_other_images_on_one_rank_are_refused_on_all(plan: ParallelPlan) -> None:
    found = errors(plan, lambda images, rank: images.flip(0) if rank == 1 else images)
    assert len({*found}) == 1 and "were given different images: they differ in rows" in found[0]
    assert "Pass the same batch on all ranks of a replica" in found[0]


def test_functions_of_boxes_are_compared() -> None:
    """Noise that each rank draws for its own box is different in the pixels that two ranks read."""
    plan = ParallelPlan(grids=((2, 1),))

    def noise(images: torch.Tensor, rank: int) -> Callable[[Box], torch.Tensor]:
        return lambda box: torch.rand(2, 3, *box.shape)

    def crop(images: torch.Tensor, rank: int) -> Callable[[Box], torch.Tensor]:
        return lambda box: images[:, :, box.y0 : box.y1, box.x0 : box.x1]

    assert "ranks 0 and 1 were given different images" in errors(plan, noise)[0]
    assert errors(plan, crop) == ["", ""]


def test_only_what_is_read_must_be_there() -> None:
    """Replicas have images of their own, ranks of later stages need none, and unread pixels do not matter."""
    replicas = ParallelPlan(grids=((1, 2),), replicas=2)
    assert errors(replicas, lambda images, rank: images.flip(0) if rank > 1 else images) == [""] * 4
    stages = ParallelPlan(grids=((1, 2), (1, 1)), cuts=("0",))
    assert errors(stages, lambda images, rank: images if rank < 2 else torch.zeros(SHAPE)) == [""] * 3

    def own_part(images: torch.Tensor, rank: int) -> torch.Tensor:
        part = torch.full(SHAPE, torch.nan)
        columns = slice(0, 21) if rank == 0 else slice(19, 40)
        part[:, :, :, columns] = images[:, :, :, columns]
        return part

    assert errors(ParallelPlan(grids=((1, 2),)), own_part) == ["", ""]


def test_parts_without_common_pixels_cannot_be_compared() -> None:
    assert errors(ParallelPlan(grids=((1, 2),)), lambda images, rank: images + rank, kernel=4) == ["", ""]


@pytest.mark.parametrize(("calls", "refused"), [(2, True), (3, False), (4, True), (64, True)])
def test_the_first_calls_are_compared_and_some_later_ones(calls: int, refused: bool) -> None:
    found = errors(ParallelPlan(grids=((1, 2),)), lambda images, rank: images + rank, calls)
    assert all(("different images" in text) is refused for text in found)
