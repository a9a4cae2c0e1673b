"""Compiled segments compute what segments compute, on any plan, or run as they are and say why."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling import graph_job, segment_compiler
from hyfi_core.lowering.compiling.segment_compiler import SegmentCompiler, why_not_compiled
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import run_copies

SHAPE = (2, 3, 20, 24)


class Block(nn.Module):
    """Residual block with a squeeze-and-excitation branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.gate = nn.Conv2d(channels, channels, 1)
        self.skip = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return F.relu(self.skip(x) + F.gelu(y) * 0.5)


class TinyNet(nn.Module):
    """Convolution, norm, pool, two blocks and a linear head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.first = Block(4)
        self.second = Block(4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.second(self.first(self.stem(x))))
        return self.head(y.mean((2, 3)))


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace, differentiate and split graphs as for compiled code, without writing code, which takes long."""
    monkeypatch.setattr(graph_job, "BACKEND", "aot_eager")
    monkeypatch.setattr(segment_compiler, "_CODE", {})
    monkeypatch.setattr("hyfi_core.runtime.parallelize.why_not_compiled", lambda device: None)


def _seeded(dtype: torch.dtype = torch.float64, **settings: Any) -> tuple[TinyNet, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = TinyNet(**settings).to(dtype)
    return model, torch.randn(SHAPE, dtype=dtype), torch.tensor([0, 2])


def _trained(plan: ParallelPlan, compile: str, autocast: Any = None, **settings: Any) -> list[dict[str, Any]]:
    """Return each rank's results after two steps and a prediction."""
    model, images, labels = _seeded(torch.float32 if autocast else torch.float64, **settings)

    def body(comm: Any, module: nn.Module) -> dict[str, Any]:
        engine = hyfi_core.parallelize(
            module,
            SHAPE,
            plan,
            comm,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            autocast=autocast,
            compile=compile,  # type: ignore[arg-type]
        )
        first = engine.train_step(images, labels)
        second = engine.accumulate(images, labels)
        found = {"loss": torch.tensor([first, second]), "traffic": engine.traffic(), "compiler": _compiler(engine)}
        found |= {"gradients": engine.gather_gradients(), "state": engine.gather_state_dict()}
        return found | {"logits": engine.predict(images)}

    with mock.patch.object(torch, "initial_seed", lambda: 7):
        return run_copies(model, plan.ranks, body)


def _compiler(engine: hyfi_core.Engine) -> SegmentCompiler | None:
    return engine._subject.compiler


def _assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-12) -> None:
    pairs = [("loss", found["loss"], wanted["loss"]), ("logits", found["logits"], wanted["logits"])]
    for kind in ("gradients", "state"):
        assert found[kind].keys() == wanted[kind].keys()
        pairs += [(name, found[kind][name], value) for name, value in wanted[kind].items()]
    everything = torch.cat([value.flatten().double() for value in wanted["gradients"].values()]).norm()
    for name, value, true in pairs:
        error = (value.double() - true.double()).norm()
        assert error <= tolerance * max(float(true.double().norm()), 1e-3 * float(everything)), name
        assert value.dtype == true.dtype


PLANS = {
    "one rank": ParallelPlan(((1, 1),), microbatches=2),
    "two ranks": ParallelPlan(((1, 2),)),
    "recompute": ParallelPlan(((1, 1),), microbatches=2, schedule="gpipe", recompute=True),
    "stages": ParallelPlan(((1, 1), (1, 1)), cuts=("first",), microbatches=2, schedule="1f1b"),
    "branches": ParallelPlan(((1, 1),), branches=2),
    "cells": ParallelPlan(((1, 1),), cells=(2, 2)),
}


LONG = ("one rank", "stages")  # the other plans have what these have


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.soak] * (one in LONG)) for one in PLANS])
def test_compiled_segments_compute_the_same(name: str) -> None:
    plan = PLANS[name]
    wanted, found = _trained(plan, "off"), _trained(plan, "on")
    _assert_same(found[0], wanted[0])
    for rank, was in zip(found, wanted, strict=True):
        assert rank["traffic"] == was["traffic"]  # not one message more or less
        assert was["compiler"] is None
        assert rank["compiler"].left == {}
    assert sum(rank["compiler"].compiled for rank in found) > 0  # equal graphs of thread-ranks are compiled once


def test_cotangents_that_are_one_tensor_are_not_overwritten() -> None:
    """Compiled code may return one tensor for several inputs, as for the operands of a sum."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3, padding=1)
            self.left, self.right = (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(2))
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.relu(self.stem(x))
            return self.head(F.gelu(self.left(y) + self.right(y)).mean((2, 3)))

    torch.manual_seed(0)
    model, images, labels = Branches().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 2])

    def body(compile: Any) -> Any:
        def run(comm: Any, module: nn.Module) -> Any:
            engine = hyfi_core.parallelize(module, SHAPE, ParallelPlan(((1, 2),)), comm, compile=compile)
            engine.accumulate(images, labels)
            return engine.gather_gradients()

        return run_copies(model, 2, run)[0]

    wanted, found = body("off"), body("on")
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-12 * gradient.norm(), name


def test_gradients_pass_norms_of_maps_with_other_strides() -> None:
    """A channels-last map of one pixel has strides that no contiguous map of its shape has."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def train(self, mode: bool = True) -> Gate:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            gate = self.norm(self.gate(y.mean((2, 3), keepdim=True)))
            return (y * (F.gelu(gate) * 1.5).tanh()).mean((2, 3))

    torch.manual_seed(0)
    model = Gate().double().to(memory_format=torch.channels_last).train()
    images = torch.randn(2, 3, 6, 8).double().contiguous(memory_format=torch.channels_last)
    found: list[dict[str, torch.Tensor]] = []
    for compile in ("off", "on"):
        engine = hyfi_core.parallelize(
            copy.deepcopy(model), (2, 3, 6, 8), ParallelPlan(((1, 1),)), AloneCommunicator(), compile=compile
        )
        engine.accumulate(images, torch.tensor([0, 2]))
        found.append(engine.gather_gradients() or {})
    compiler = _compiler(engine)
    assert compiler is not None and compiler.compiled > 0
    assert found[0].keys() == found[1].keys() == dict(model.named_parameters()).keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-10, atol=1e-14, msg=name)


def test_dropout_draws_the_same_numbers() -> None:
    plan = ParallelPlan(((1, 1),))
    wanted, (found,) = _trained(plan, "off", dropout=0.5), _trained(plan, "on", dropout=0.5)
    _assert_same(found, wanted[0])
    assert found["compiler"].compiled > 0


def test_autocast_is_part_of_the_graph() -> None:
    plan = ParallelPlan(((1, 1),))
    wanted, (found,) = _trained(plan, "off", torch.bfloat16), _trained(plan, "on", torch.bfloat16)
    _assert_same(found, wanted[0], 0.03)
    assert found["compiler"].compiled > 0 and found["compiler"].left == {}
    graphs = [key[1] for key in segment_compiler._CODE]  # type: ignore[index]
    assert any("torch.bfloat16" in graph for graph in graphs)


def test_contributions_are_the_same() -> None:
    model, images, _ = _seeded()
    found = []
    for compile in ("off", "on"):
        module = copy.deepcopy(model)
        engine = hyfi_core.parallelize(
            module, SHAPE, ParallelPlan(((1, 1),)), AloneCommunicator(), verify=False, compile=compile
        )
        found.append(engine.attribute(images))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6) and torch.allclose(found[0][1], found[1][1], atol=1e-6)


def test_equal_blocks_share_their_code() -> None:
    # In training on two ranks, both blocks have the same segments, of the same shapes.
    _trained(ParallelPlan(((1, 2),)), "on")
    graphs = [(key[1], key[3]) for key in segment_compiler._CODE]  # type: ignore[index]
    assert len(set(graphs)) == len(graphs)
    with mock.patch.object(graph_job.GraphJob, "compiled", side_effect=AssertionError("compiled again")):
        ranks = _trained(ParallelPlan(((1, 2),)), "on")
    assert [rank["compiler"].left for rank in ranks] == [{}, {}]
    compiler = ranks[0]["compiler"]
    assert compiler.segments > 1 and compiler.compiled == 0 and compiler.seconds > 0
    assert compiler.describe().startswith(f"compiled {compiler.segments} segments (0 compiled anew) of the model in ")


def test_a_rank_that_cannot_compile_runs_as_it_is_and_says_so_once() -> None:
    made = graph_job.GraphJob.compiled
    calls = []

    def fails_at_first(job: Any) -> Any:
        calls.append(job)
        if len(calls) == 1:
            raise RuntimeError("no space left for code")
        return made(job)

    plan = ParallelPlan(((1, 2),))
    wanted = _trained(plan, "off")
    with (
        mock.patch.object(graph_job.GraphJob, "compiled", fails_at_first),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        found = _trained(plan, "on")
    _assert_same(found[0], wanted[0])
    assert [rank["traffic"] for rank in found] == [rank["traffic"] for rank in wanted]
    assert sum(sum(rank["compiler"].left.values()) for rank in found) == 1
    texts = [str(item.message) for item in said if "uncompiled" in str(item.message)]
    assert len(texts) == 1 and "no space left for code" in texts[0]


def test_the_warning_has_the_error_of_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch announces it in the first line of its own."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(graph_job, "BACKEND", backend)
    with pytest.warns(UserWarning, match="uncompiled on this rank: .*RuntimeError: the disk is full"):
        _trained(ParallelPlan(((1, 1),)), "on")


def test_without_a_compiler_on_one_rank_none_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((None, "there is no C++ compiler"))
    monkeypatch.setattr("hyfi_core.runtime.parallelize.why_not_compiled", lambda device: next(answers))
    with pytest.warns(UserWarning, match="uncompiled on all ranks: on rank .*there is no C\\+\\+ compiler"):
        ranks = _trained(ParallelPlan(((1, 2),)), "on")
    assert [rank["compiler"] for rank in ranks] == [None, None]


def test_auto_compiles_on_gpus_only() -> None:
    assert _trained(ParallelPlan(((1, 1),)), "auto")[0]["compiler"] is None


@pytest.mark.parametrize(
    ("compile", "plan", "reason"),
    [
        ("yes", ParallelPlan(((1, 1),)), "compile is 'yes'; pass 'auto', 'off' or 'on'"),
        ("on", ParallelPlan(((1, 1),), cells=(2, 2), spill="memory"), "plan.spill='memory'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(compile: Any, plan: ParallelPlan, reason: str) -> None:
    model, _, _ = _seeded()
    with pytest.raises(RequestError, match=reason):
        hyfi_core.parallelize(model, SHAPE, plan, AloneCommunicator(), compile=compile)


def test_code_of_the_real_compiler_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not_compiled(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(graph_job, "BACKEND", "inductor")

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return (F.silu(y) + y).mean((2, 3))

    torch.manual_seed(0)
    model, found = Gated(), []
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 2])
    for compile in ("off", "on"):
        module = copy.deepcopy(model)
        engine = hyfi_core.parallelize(
            module, (2, 3, 8, 8), ParallelPlan(((1, 1),)), AloneCommunicator(), verify=False, compile=compile
        )
        loss = engine.accumulate(images, labels)
        gradient = engine.gather_gradients()
        assert gradient is not None
        found.append((torch.tensor(loss), gradient["conv.weight"], gradient["conv.bias"]))
    compiler = _compiler(engine)
    assert compiler is not None and compiler.compiled == 1 and compiler.left == {}
    for value, wanted in zip(found[1], found[0], strict=True):
        assert torch.allclose(value, wanted, rtol=1e-5, atol=1e-6)
