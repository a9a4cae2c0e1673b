"""Images computed again from their pixels, and indices of maxima from the map, change no bit of a training step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.cells import pager, paging
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet6
from hyfi_core.ops.max_pool import MaxPool
from hyfi_core.plan.box import Box
from hyfi_core.runtime.batch_reader import PixelParts
from tests.harness import captured_once  # noqa: F401 (what follows captures each model once)
from tests.test_cells import Bytes, Mixed

SHAPE = (2, 3, 67, 53)


class Ties(nn.Module):
    """A max pool of few different values, with dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.second, self.drop, self.head = nn.Conv2d(8, 8, 3, 1, 1), nn.Dropout(0.3), nn.Linear(8, 2)
        with torch.no_grad():
            self.first.weight.copy_(self.first.weight.sign())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.norm(self.first(x)), 3, 2, 1)
        return self.head((self.drop(self.second(x)).relu() + x).mean((2, 3)))


class Pixels:
    """A batch in bytes of few different values."""

    pixel_dtype = torch.uint8

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.bytes = 100 * torch.randint(0, 3, SHAPE, dtype=torch.uint8, generator=torch.Generator().manual_seed(8))
        self.prepared = 0

    def pixels(self, box: Box, first: int, stop: int) -> torch.Tensor:
        return self.bytes[first:stop, :, box.y0 : box.y1, box.x0 : box.x1]

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        self.prepared += 1
        return pixels.to(self.dtype).div_(100).sub_(1)

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        return self.prepare(self.pixels(box, first, stop))


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every map be a page, and a pager hold 30 KB of them: less than most steps need."""
    monkeypatch.setattr(pager, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 30_000)


MODELS = {"resnet": lambda: resnet6(2, width=4), "ties": Ties, "mixed": Mixed}


def step(name: str, images: Any, plan: ParallelPlan, dtype: torch.dtype, **more: Any) -> tuple[Any, ...]:
    """Return the loss, all gradients and buffers, and what was spilled."""
    torch.manual_seed(7)
    model = MODELS[name]().to(dtype)
    torch.manual_seed(8)
    engine = hyfi_core.parallelize(model, SHAPE, plan, AloneCommunicator(), **more)
    loss = engine.accumulate(images, torch.tensor([0, 1]))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return loss, [*gradients, *model.buffers()], engine.spilled()


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("source", ["pixels", "floats"])
@pytest.mark.parametrize(
    ("name", "cells", "precision", "others"),
    [
        ("resnet", (2, 2), "float32", {}),
        ("resnet", (2, 3), "bfloat16", {}),
        ("resnet", (4, 4), "float64", {"microbatches": 2}),  # parts smaller than the halo
        ("ties", (2, 2), "bfloat16", {"microbatches": 2, "recompute": True}),
        ("ties", (3, 2), "float32", {}),
        ("mixed", (2, 2), "float32", {}),
    ],
)
def test_what_is_computed_again_is_the_same(
    name: str, cells: tuple[int, int], precision: str, others: dict[str, Any], source: str, tmp_path: Path
) -> None:
    dtype = torch.float64 if precision == "float64" else torch.float32
    more = {"autocast": torch.bfloat16} if precision == "bfloat16" else {}
    images = Pixels(dtype)
    whole = images.read(Box(0, SHAPE[2], 0, SHAPE[3]), 0, SHAPE[0])
    loss, tensors, none = step(name, whole, ParallelPlan(((1, 1),), cells=cells, **others), dtype, **more)
    images.prepared = 0
    plan = ParallelPlan(((1, 1),), cells=cells, spill=str(tmp_path), **others)
    given = images if source == "pixels" else whole
    spilled_loss, spilled, counts = step(name, given, plan, dtype, **more)
    assert none is None and loss == spilled_loss
    assert all(torch.equal(a, b) for a, b in zip(tensors, spilled, strict=True))
    parts = cells[0] * cells[1] * others.get("microbatches", 1)
    assert images.prepared > parts if source == "pixels" else images.prepared == 0
    assert counts.written_bytes > 10_000


@pytest.mark.usefixtures("small_pages")
def test_a_step_of_pixels_is_that_of_one_process() -> None:
    images = Pixels(torch.float64)
    torch.manual_seed(7)
    model = resnet6(2, width=4).double()
    cross_entropy(model(images.read(Box(0, 67, 0, 53), 0, 2)), torch.tensor([0, 1])).backward()
    wanted = [p.grad for p in model.parameters()]
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill="memory")
    _, tensors, _ = step("resnet", images, plan, torch.float64)
    for found, gradient in zip(tensors, wanted, strict=False):
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("small_pages")
def test_less_is_written_of_pixels_and_no_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    remade: list[int] = []
    remake = MaxPool.remake

    def noted(self: MaxPool, own: torch.Tensor) -> torch.Tensor:
        remade.append(own.numel())
        return remake(self, own)

    monkeypatch.setattr(MaxPool, "remake", noted)
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill="memory")
    images = Pixels(torch.float32)
    _, _, counts = step("resnet", images, plan, torch.float32)
    assert len(remade) >= 4
    whole = images.read(Box(0, 67, 0, 53), 0, 2)
    _, _, of_floats = step("resnet", whole, plan, torch.float32)
    image_bytes = whole.nbytes
    assert of_floats.written_bytes - counts.written_bytes > 0.7 * image_bytes
    assert of_floats.store_bytes - counts.store_bytes > 0.7 * image_bytes


@pytest.mark.usefixtures("small_pages")
def test_a_model_that_takes_bytes_spills_the_same_bits() -> None:
    images, found = Pixels(torch.float32), []
    for spill in (None, "memory"):
        torch.manual_seed(7)
        model = nn.Sequential(Bytes(), resnet6(2, width=4))
        plan = ParallelPlan(((1, 1),), cells=(2, 2), spill=spill)
        engine = hyfi_core.parallelize(model, SHAPE, plan, AloneCommunicator(), image_dtype=torch.uint8)
        loss = engine.accumulate(images.bytes, torch.tensor([0, 1]))
        found.append([torch.tensor(loss), *(copy.deepcopy(p.grad) for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("small_pages")
def test_no_map_outlives_the_backward_that_needs_it() -> None:
    torch.manual_seed(7)
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill="memory")
    engine = hyfi_core.parallelize(resnet6(2, width=4), SHAPE, plan, AloneCommunicator())
    engine.accumulate(Pixels(torch.float32), torch.tensor([0, 1]))
    assert engine._paging is not None
    engine._paging.pager._forget_freed()
    held = [page.size for page in engine._paging.pager._pages.values()]
    assert sum(held) < 1000, held


def test_pixels_of_another_type_than_told_are_refused() -> None:
    images = Pixels(torch.float32)
    assert isinstance(images, PixelParts)
    images.pixel_dtype = torch.int16  # type: ignore[misc]
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill="memory")
    with pytest.raises(RequestError, match=r"returned torch.uint8; images say that their pixel_dtype is torch.int16"):
        step("resnet", images, plan, torch.float32)
