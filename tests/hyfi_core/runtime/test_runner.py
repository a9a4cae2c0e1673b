"""Cell by cell in one process: the same answers as in one piece, and one cell's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import hyfi_core
from hyfi_core.cells import fused_memory
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.lowering.segments import OperatorStep
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet6, resnet10, resnet18
from hyfi_core.plan.box import Box
from hyfi_core.rules.instructions import CollectiveCall
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.lowered_model import HostedStage
from tests.harness import captured_once

TOLERANCE = 1e-10


class Awkward(nn.Module):
    """What ends a fused run: statistics, a squeeze, slices, padding, resizing, a maximum, a flattened map."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(2, 8)
        self.squeeze = nn.Linear(8, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, dilation=1)
        self.last = nn.Conv2d(16, 4, 3, stride=2)
        self.head = nn.Linear(4 * 4 * 4 + 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(F.pad(x, (1, 0, 2, 1)))))
        x = x * torch.sigmoid(self.squeeze(x.mean((2, 3))))[:, :, None, None]
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        deep = F.interpolate(F.max_pool2d(self.second(x), 2), size=x.shape[-2:], mode="bilinear")
        y = F.adaptive_avg_pool2d(self.last(torch.cat([shifted, deep], 1)), 4)
        return self.head(torch.cat([y.flatten(1), x.amax((2, 3))], 1))


class Shifting(nn.Module):
    """Slices and padding of every kind, which stand inside fused runs: steps, ends, crops, values, channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, stride=2)
        self.third, self.head = nn.Conv2d(6, 4, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x[:, :, 3:-2, ::2], (2, 1, 0, 3), value=0.5)
        x = self.first(F.pad(x, (-1, 1, 1, -2)))
        x = torch.cat([x[:, 3:], F.pad(x[:, :3, 1:, 1:], (0, 1, 0, 1), value=-1.0)], 1)
        x = self.third(F.pad(self.second(x), (1, 1, 1, 1, 0, 0)))
        x = F.pad(x, (2, 2, 1, 1), mode="reflect") + F.pad(x, (2, 2, 1, 1, 0, 0), value=2.0)
        return self.head(torch.cat([F.pad(x, (0, 0, 0, 0, 1, -1)).mean((2, 3)), x.amax((2, 3))], 1))


def settled(model: nn.Module) -> nn.Module:
    """Return the model in float64, its norms as after some training."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features, generator=generator)
            module.running_var = torch.rand(module.num_features, generator=generator) + 0.5
            module.bias.data = torch.randn(module.num_features, generator=generator)
    return model.double()


def images_of(shape: tuple[int, int, int, int]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _captured_once() -> Iterator[None]:
    """Share captures, which take most of the time, between cases and with the engine of one piece."""
    with mock.patch("hyfi_core.runtime.subject.capture", captured_once):
        yield


def by_cells(model: nn.Module, shape: tuple[int, int, int, int], cells: tuple[int, int]) -> Engine:
    return hyfi_core.parallelize(model, shape, hyfi_core.ParallelPlan(((1, 1),), cells=cells), AloneCommunicator())


def evaluated(engine: Engine, cell: int) -> HostedStage:
    """Return what a cell does in evaluation mode."""
    runner = engine._runners[cell]
    return list(runner._cache.values())[-1].only


MODELS = {
    "resnet10": (lambda: resnet10(3, width=16), (2, 3, 131, 117)),
    "amoebanet": (lambda: amoebanet_d(3, 3, 16), (1, 3, 118, 101)),
    "awkward": (Awkward, (2, 3, 61, 53)),
    "shifting": (Shifting, (2, 3, 47, 58)),
}
CASES = [
    pytest.param("resnet10", (2, 3), marks=pytest.mark.soak),
    ("resnet10", (6, 5)),
    pytest.param("amoebanet", (3, 2), marks=pytest.mark.soak),
    pytest.param("amoebanet", (5, 1), marks=pytest.mark.soak),
    ("awkward", (2, 2)),
    ("awkward", (3, 7)),
    ("shifting", (2, 3)),
    ("shifting", (4, 1)),
]


@pytest.mark.parametrize(("name", "cells"), CASES)
def test_cells_equal_one_piece(name: str, cells: tuple[int, int]) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, images = settled(make()), images_of(shape)
    engine = by_cells(model, shape, cells)
    found = engine.predict(images)
    assert all(module.training for module in model.modules()), "every module gets its own flag back"
    with torch.no_grad():
        wanted = model.eval()(images)
    assert float((found - wanted).norm()) <= TOLERANCE * float(wanted.norm())
    splits = evaluated(engine, 0).ranked.splits.values()
    owns_nothing = any(part.empty for split in splits for part in split.layout.parts)
    assert owns_nothing or cells not in ((6, 5), (5, 1), (3, 7)), "these are meant to have cells with nothing to do"


def test_contributions_are_those_of_one_piece() -> None:
    torch.manual_seed(0)
    make, shape = MODELS["resnet10"]
    model, images = settled(make()), images_of(shape)
    whole = hyfi_core.parallelize(model, shape, hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator())
    engine = by_cells(model, shape, (3, 2))
    for found, wanted in zip(engine.explain(images), whole.explain(images), strict=True):
        assert found.dtype == torch.float32 and found.shape == wanted.shape
        assert float((found - wanted).norm()) <= 1e-6 * float(wanted.norm())


@pytest.mark.parametrize("spill", [None, "memory"])
def test_a_failed_read_leaves_nothing_to_the_next_call(spill: str | None) -> None:
    torch.manual_seed(0)
    make, shape = MODELS["resnet10"]
    model, images = settled(make()), images_of(shape)
    plan = hyfi_core.ParallelPlan(((1, 1),), cells=(3, 2), spill=spill)
    engine = hyfi_core.parallelize(model, shape, plan, AloneCommunicator())
    wanted = engine.predict(images)
    for call in (engine.predict, engine.explain):
        boxes: list[Box] = []

        def read(box: Box, boxes: list[Box] = boxes) -> torch.Tensor:
            boxes.append(box)
            if len(boxes) == 4:
                raise OSError("the disk is gone")
            return torch.randn(*shape[:2], *box.shape, dtype=torch.float64)

        with pytest.raises(OSError, match="the disk is gone"):
            call(read)
        assert torch.equal(engine.predict(images), wanted)


@pytest.mark.parametrize("depth", [2, 8, 1000])
def test_slices_and_padding_stand_inside_runs_of_any_length(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_memory, "DEPTHS", (depth,))
    model, shape = settled(Shifting()), (1, 3, 64, 71)
    images = images_of(shape)
    engine = by_cells(model, shape, (3, 3))
    torch.testing.assert_close(engine.predict(images), model.eval()(images), rtol=0, atol=1e-10)
    exchanges = sum(
        isinstance(step, OperatorStep) and isinstance(step.call, CollectiveCall) and step.call.traffic == "halo"
        for step in evaluated(engine, 4).tape.steps
    )
    assert exchanges == 1 if depth == 1000 else exchanges >= 1, "reflected padding alone ends a run that may be longest"


def test_each_cell_reads_its_box_once_and_never_the_whole() -> None:
    model, shape = settled(resnet6(2, width=4)), (1, 3, 512, 384)
    images, asked = images_of(shape), []

    def read(box: Box) -> torch.Tensor:
        asked.append(box)
        return images[:, :, box.y0 : box.y1, box.x0 : box.x1]

    found = by_cells(model, shape, (4, 3)).predict(read)
    assert len(asked) == 12 and max(box.area for box in asked) < 512 * 384 / 3
    torch.testing.assert_close(found, model.eval()(images), rtol=0, atol=1e-10)


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operators have made and that are still there; the most of them.

    Args:
        given: one that was there before.
    """

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self._given = given.untyped_storage()._cdata
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata != self._given:
                    self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._known.values()))
        return result


@pytest.mark.soak
def test_the_peak_is_one_cells_and_as_modelled() -> None:
    model, shape = resnet18(2, width=8).eval(), (1, 3, 1536, 1536)
    images = torch.randn(shape)
    peaks = []
    for cells in ((1, 1), (6, 6)):
        engine = by_cells(model, shape, cells)
        alive = Alive(images)
        with alive:  # a mode of one thread, in which all cells run
            engine.predict(lambda box: images[:, :, box.y0 : box.y1, box.x0 : box.x1])
        peaks.append(alive.peak_bytes)
    program = pool_before_relu(captured_once(model, shape, torch.float32), ())
    modelled = fused_memory.runs_for_cells(program, (6, 6))[1].peak_bytes
    assert peaks[1] < peaks[0] / 6
    assert 0.5 * modelled < peaks[1] < 1.6 * modelled


def test_an_explanation_needs_hardly_more_memory_than_a_prediction() -> None:
    model, shape = resnet10(2, width=8).eval(), (1, 3, 1024, 1024)
    images = torch.randn(shape)
    engine, peaks = by_cells(model, shape, (6, 6)), {}
    for name in ("predict", "explain"):
        alive, call = Alive(images), getattr(engine, name)
        with alive:  # tapes of all cells run in this thread
            call(lambda box: images[:, :, box.y0 : box.y1, box.x0 : box.x1].clone())
        peaks[name] = alive.peak_bytes
    assert peaks["explain"] < 1.3 * peaks["predict"] < images.nbytes, peaks


def test_weights_are_shared_and_loaded_in_place() -> None:
    model, shape = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))), (1, 3, 64, 64)
    engine, images = by_cells(model, shape, (2, 2)), images_of(shape)
    before = engine.predict(images)
    state = {name: value * 1.5 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    engine.load_state_dict(state)
    after = engine.predict(images)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model.eval()(images), rtol=0, atol=1e-10 * float(after.abs().max()))


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"cells is \(0, 2\)"):
        by_cells(resnet6(2), (1, 3, 64, 64), (0, 2))
    engine = by_cells(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(2)), (1, 3, 16, 16), (2, 2))
    with pytest.raises(RequestError, match="images have shape"):
        engine.predict(torch.zeros(3, 16, 16))
    with pytest.raises(RequestError, match="contributions"):
        engine.attribute(torch.zeros(1, 3, 16, 16))
