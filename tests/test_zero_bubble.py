"""Schedules that divide backwards train as one process does, with as many operations as undivided ones."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet10
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.product import LocalProduct
from hyfi_core.runtime.backward import BackwardPass
from hyfi_core.runtime.gradients import ReductionGroup
from hyfi_core.schedule.action import Verb
from tests.harness import run_copies
from tests.steps import adamw, assert_plan_equals_one_process, sgd
from tests.test_branches import SmallInception
from tests.test_plans import Hourglass

SHAPE = (4, 3, 33, 38)
ONE = (1, 1)


class Mixed(nn.Module):
    """Products of every kind: tied, normed, transposed, over positions; and weights without product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.tied = nn.Conv2d(8, 8, 3, padding=1)
        self.normed = weight_norm(nn.Conv2d(8, 8, 1))
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.gamma = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.tokens = nn.Conv2d(8, 8, 4, 4)
        self.layer = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.down, self.back = nn.Linear(8, 3, bias=False), nn.Parameter(torch.randn(3, 8) / 3)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.tied(F.relu(self.tied(self.stem(x)))))
        x = self.norm(self.normed(x))
        x = self.gamma * self.up(x[:, :, ::2, ::2])
        tokens = self.layer(self.tokens(x).flatten(2).transpose(1, 2))
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        tokens = tokens + F.gelu(self.down(tokens)) @ self.back
        return self.fc(tokens.mean(1))


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


CASES: dict[str, Any] = {
    "four stages with skips": (lambda: Hourglass(2), ((1, 2), ONE, ONE, ONE), ("enter", "down1", "up1"), {}),
    "replicas": (lambda: Hourglass(2), (ONE, ONE), ("down1",), {"replicas": 2}),
    "recomputed": (lambda: resnet10(2, width=4), ((2, 1), ONE), ("layer1",), {"recompute": True}),
    "frozen": (lambda: frozen(resnet10(2, width=4), "conv1", "layer2"), (ONE, ONE), ("layer1",), {}),
    "cells": (lambda: Hourglass(2), (ONE, ONE), ("down1",), {"cells": (2, 1)}),
    "mixed products on parts": (Mixed, ((1, 2), ONE), ("norm",), {}),
    "branches": (lambda: SmallInception(classes=2), (ONE, ONE), ("first",), {"branches": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.soak] * (one == "branches")) for one in CASES])
def test_divided_backwards_equal_one_process(name: str) -> None:
    make, grids, cuts, others = CASES[name]
    torch.manual_seed(5)
    plan = ParallelPlan(grids, cuts, 4, "zb_h1", **others)
    factory = adamw if name == "replicas" else sgd
    strict = plan.cells is None  # cells need tags
    assert_plan_equals_one_process(make(), SHAPE, plan, factory=factory, steps=1 + (plan.stages > 2), strict=strict)


def of_plan(model: nn.Module, plan: ParallelPlan) -> hyfi_core.Engine:
    torch.manual_seed(0)
    return hyfi_core.parallelize(model.double(), SHAPE, plan, AloneCommunicator())


def accumulated(engine: hyfi_core.Engine) -> dict[str, torch.Tensor]:
    engine.accumulate(torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))
    return engine.gather_gradients() or {}


def test_a_run_goes_on_with_another_schedule(tmp_path: Any) -> None:
    def steps(schedules: list[Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        model = Hourglass(2).double()
        start = model.state_dict()
        for number, schedule in enumerate(schedules):
            engine = hyfi_core.parallelize(
                model, SHAPE, ParallelPlan((ONE,), (), 2, schedule), AloneCommunicator(), optimizer=sgd
            )
            if number:
                engine.load(tmp_path / "saved")
            engine.train_step(torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))
            engine.save(tmp_path / "saved")
        assert start.keys() == model.state_dict().keys()
        return {name: value.clone() for name, value in model.state_dict().items()}

    wanted = steps(["1f1b", "1f1b", "1f1b"])
    for name, value in steps(["zb_h1", "1f1b", "zb_h1"]).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)


def operations(schedule: Any) -> int:
    torch.manual_seed(1)
    engine = of_plan(Mixed(), ParallelPlan((ONE,), (), 2, schedule))
    with FlopCounterMode(display=False) as counted:
        accumulated(engine)
    return counted.get_total_flops()


def test_the_parts_of_a_backward_are_as_many_operations_as_the_whole() -> None:
    assert operations("zb_h1") == operations("1f1b") > 0


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_in_float32_and_under_autocast_only_the_order_of_two_uses_differs(autocast: torch.dtype | None) -> None:
    def gradients(schedule: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        plan = ParallelPlan((ONE,), (), 2, schedule)
        engine = hyfi_core.parallelize(Mixed(), SHAPE, plan, AloneCommunicator(), verify=False, autocast=autocast)
        engine.accumulate(torch.ones(SHAPE), torch.tensor([0, 1, 1, 0]))
        return engine.gather_gradients() or {}

    whole, parts = gradients("1f1b"), gradients("zb_h1")
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        close = 1e-2 if name.startswith("tied") else 0.0  # used twice in each micro-batch
        assert (parts[name] - gradient).norm() <= close * gradient.norm(), name


def test_weights_wait_and_maps_do_not() -> None:
    """In I, no gradient of a convolution or linear layer; after W, nothing of the micro-batch is left."""
    kinds: list[Any] = []
    first = BackwardPass.run_first
    passes: list[Any] = []

    def watched_first(self: BackwardPass, *given: Any) -> Any:
        found = yield from first(self, *given)
        kinds.append([type(one.record.step.call.operator) for one in self._deferred])
        passes.append(weakref.ref(self._deferred[0].record))
        return found

    engine = of_plan(Mixed(), ParallelPlan((ONE,), (), 1, "zb_h1"))
    with mock.patch.object(BackwardPass, "run_first", watched_first):
        accumulated(engine)
    # Stem, tied twice, up, tokens, attention twice, down, back, fc; the weight of `normed` is computed from others.
    assert kinds == [[LocalProduct] * 10]
    gc.collect()
    assert passes[0]() is None


def test_on_parts_convolutions_with_halos_wait_too() -> None:
    kinds: list[Any] = []
    first = BackwardPass.run_first

    def watched(self: BackwardPass, *given: Any) -> Any:
        found = yield from first(self, *given)
        kinds.extend(type(one.record.step.call.operator) for one in self._deferred)
        return found

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, ParallelPlan(((1, 2),), (), 2, "zb_h1"), comm)
        return accumulated(engine)

    with mock.patch.object(BackwardPass, "run_first", watched):
        run_copies(resnet10(2, width=4).double(), 2, body)
    assert {Convolution, LocalProduct} == set(kinds)


def test_reductions_start_during_the_last_weight_gradients() -> None:
    order: list[str] = []
    start, compute = ReductionGroup._start, BackwardPass._compute

    def started(self: ReductionGroup, bucket: Any) -> None:
        order.append("reduce")
        start(self, bucket)

    def computed(self: BackwardPass, deferred: Any) -> None:
        compute(self, deferred)
        order.append("weight")

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, ParallelPlan((ONE,), (), 2, "zb_h1", replicas=2), comm)
        accumulated(engine)
        return [action.verb for action, _, _ in engine.events if action.verb in (Verb.I, Verb.W)]

    with (
        mock.patch("hyfi_core.runtime.gradients.BUCKET_BYTES", 1),
        mock.patch.object(ReductionGroup, "_start", started),
        mock.patch.object(BackwardPass, "_compute", computed),
    ):
        verbs = run_copies(resnet10(2, width=4).double(), 2, body)
    assert verbs == [[Verb.I, Verb.W] * 2] * 2
    last = len(order) - order[::-1].index("weight")
    assert order[:last].count("reduce") > 0 and order.index("reduce") > order.index("weight")


def test_spilling_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"plan.schedule is zb_h1 with plan.spill 'memory'.*use schedule 1f1b"):
        ParallelPlan((ONE,), (), 2, "zb_h1", cells=(2, 2), spill="memory")
