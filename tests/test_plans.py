"""Stages, schedules, directions and replicas compose: every plan trains as one process does."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.capture.export import capture
from hyfi_core.capture.stages import cut_program
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.cost.operators import operator_costs
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.errors import RequestError
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet6, resnet10, resnet18
from hyfi_core.runtime.executor import Executor
from hyfi_core.runtime.gradients import ReductionGroup
from tests.harness import identity, one_process, run_copies
from tests.steps import (
    Factory,
    adamw,
    assert_equal_steps,
    assert_plan_equals_one_process,
    make_batches,
    one_process_steps,
    parallel_steps,
    sgd,
)
from workflows.benchmarks.forecast.allocated import peak_of

SCHEDULES = ("sequential", "gpipe", "1f1b", "gems_mast", "gems_master", "chimera")


class Hourglass(nn.Module):
    """A small U-Net with a linear head; its skips go over several stages."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.enter = self._block(3, width)
        self.down1 = self._block(width, 2 * width, 2)
        self.down2 = self._block(2 * width, 2 * width, 2)
        self.up1 = self._block(4 * width, width)
        self.up2 = self._block(2 * width, width)
        self.fc = nn.Linear(width, 2)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.enter(x)
        b = self.down1(a)
        c = self.down2(b)
        c = nn.functional.interpolate(c, size=b.shape[-2:], mode="bilinear", align_corners=False)
        d = self.up1(torch.cat([c, b], 1))
        d = nn.functional.interpolate(d, size=a.shape[-2:], mode="nearest")
        return self.fc(self.up2(torch.cat([d, a], 1)).mean((2, 3)))


def make(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a model and three places to cut it."""
    torch.manual_seed(5)
    if name in ("resnet10", "resnet18"):
        return (resnet10 if name == "resnet10" else resnet18)(2, width=4), ("layer1", "layer2", "layer3")
    if name == "amoebanet":
        return amoebanet_d(2, layers=3, filters=16), ("cells.0", "cells.2", "cells.4")
    return Hourglass(), ("enter", "down1", "up1")


GRIDS = {
    "1+1": ((1, 1), (1, 1)),
    "4+1": ((2, 2), (1, 1)),
    "2+2+1": ((1, 2), (2, 1), (1, 1)),
    "4+2+1+1": ((2, 2), (1, 2), (1, 1), (1, 1)),
}


def plan_of(grids: str, cuts: tuple[str, ...], schedule: str, **others: object) -> ParallelPlan:
    chosen = GRIDS[grids]
    return ParallelPlan(chosen, cuts[: len(chosen) - 1], 4, schedule, **others)  # type: ignore[arg-type]


QUICK = [
    ("resnet10", "1+1", "sequential", 2, sgd),
    ("resnet10", "4+1", "gpipe", 1, adamw),
    pytest.param("resnet10", "2+2+1", "1f1b", 2, sgd, marks=pytest.mark.soak),
    ("resnet10", "4+2+1+1", "chimera", 1, adamw),
    pytest.param("amoebanet", "4+1", "1f1b", 1, adamw, marks=pytest.mark.soak),  # as of the hourglass, maps skip stages
    pytest.param("hourglass", "4+2+1+1", "gems_mast", 2, adamw, marks=pytest.mark.soak),
    ("hourglass", "2+2+1", "chimera", 1, sgd),
    pytest.param("hourglass", "4+2+1+1", "1f1b", 1, sgd, marks=pytest.mark.soak),
    pytest.param("hourglass", "1+1", "gems_master", 2, sgd, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("name", "grids", "schedule", "replicas", "factory"), QUICK)
def test_plans_equal_one_process(name: str, grids: str, schedule: str, replicas: int, factory: Factory) -> None:
    model, cuts = make(name)
    plan = plan_of(grids, cuts, schedule, replicas=replicas)
    shape, steps = ((4, 3, 97, 113), 2) if name == "amoebanet" else ((4, 3, 37, 45), 3)  # it halves its maps five times
    assert_plan_equals_one_process(model, shape, plan, factory=factory, steps=steps)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grids", GRIDS)
@pytest.mark.parametrize("name", ["resnet18", "amoebanet", "hourglass"])
def test_every_plan_equals_one_process(name: str, grids: str, schedule: str, replicas: int) -> None:
    model, cuts = make(name)
    plan = plan_of(grids, cuts, schedule, replicas=replicas)
    shape = (4, 3, 97, 113) if name == "amoebanet" else (4, 3, 37, 45)
    for factory in (sgd, adamw):
        assert_plan_equals_one_process(model, shape, plan, factory=factory, steps=2 if name == "amoebanet" else 5)


def test_hyfis_canonical_plan() -> None:
    """Five stages, the first over four ranks, eight ranks, two directions, two micro-batches."""
    torch.manual_seed(6)
    grids = ((2, 2), (1, 1), (1, 1), (1, 1), (1, 1))
    plan = ParallelPlan(grids, ("layer1", "layer2", "layer3", "layer4.0"), 2, "gems_master")
    assert plan.ranks == 8
    assert_plan_equals_one_process(resnet10(2, width=4), (4, 3, 50, 45), plan)


def test_sixteen_ranks_in_all_five_dimensions() -> None:
    model, cuts = make("hourglass")
    plan = ParallelPlan(((2, 2), (1, 2), (1, 1), (1, 1)), cuts, 4, "chimera", replicas=2)
    assert plan.ranks == 16
    assert_plan_equals_one_process(model, (4, 3, 37, 45), plan, steps=2)


@pytest.mark.parametrize("schedule", [*(pytest.param(s, marks=pytest.mark.soak) for s in ("gpipe", "1f1b")), "chimera"])
def test_recomputed_stages_repeat_no_communication(schedule: str) -> None:
    model, cuts = make("hourglass")
    plain = plan_of("4+2+1+1", cuts, schedule)
    again = plan_of("4+2+1+1", cuts, schedule, recompute=True)
    told = [assert_plan_equals_one_process(model, (4, 3, 37, 45), plan, steps=1) for plan in (plain, again)]
    assert [traffic for traffic, _ in told[0]] == [traffic for traffic, _ in told[1]]


@pytest.mark.parametrize(("microbatches", "schedule", "forwards"), [(1, "1f1b", 1), (2, "1f1b", 2), (2, "gpipe", 4)])
def test_what_would_save_nothing_is_not_recomputed(microbatches: int, schedule: str, forwards: int) -> None:
    model, _ = make("hourglass")
    plan = ParallelPlan(((1, 1),), microbatches=microbatches, schedule=schedule, recompute=True)  # type: ignore[arg-type]
    assert_plan_equals_one_process(model, (2, 3, 37, 45), plan, steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = hyfi_core.parallelize(model, (2, 3, 37, 45), plan, AloneCommunicator())
    assert any("saves no memory" in str(one.message) for one in caught) == (schedule == "1f1b")
    run = Executor.forward
    with mock.patch.object(Executor, "forward", autospec=True, side_effect=run) as counted:
        engine.accumulate(torch.rand(2, 3, 37, 45), torch.tensor([0, 1]))
    assert counted.call_count == forwards


@pytest.mark.parametrize(
    ("grids", "schedule", "factory"),
    [
        pytest.param("4+2+1+1", "gems_master", adamw, marks=pytest.mark.soak),
        ("2+2+1", "chimera", sgd),
        pytest.param("4+2+1+1", "gems_master", sgd, marks=pytest.mark.soak),
        pytest.param("2+2+1", "chimera", adamw, marks=pytest.mark.soak),
    ],
)
def test_one_direction_may_own_the_optimiser(grids: str, schedule: str, factory: Factory) -> None:
    model, cuts = make("hourglass")
    plan = plan_of(grids, cuts, schedule, mirror="point_to_point")
    assert_plan_equals_one_process(model, (4, 3, 37, 45), plan, factory=factory)


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(((1, 1),), microbatches=2, interleave=3, recompute=True),
        ParallelPlan(((2, 1),), interleave=3, recompute=True),
        ParallelPlan(((1, 1),), interleave=2, recompute=True, replicas=2),
        ParallelPlan(((1, 1),), interleave=3, recompute=True, cells=(2, 2)),
        ParallelPlan(((1, 2),), microbatches=2, interleave=2, recompute=True, cells=(2, 1)),
    ],
    ids=["one rank", "grid", "replicas", "cells", "cells of a grid"],
)
def test_pieces_of_one_grid_are_recomputed_one_after_the_other(plan: ParallelPlan) -> None:
    torch.manual_seed(8)
    strict = plan.cells is None or plan.ranks == 1  # cells of several ranks need messages with tags
    assert_plan_equals_one_process(resnet6(2, width=4), (2, 3, 50, 45), plan, strict=strict)


def test_pieces_that_are_not_recomputed_give_a_warning() -> None:
    plan = ParallelPlan(((1, 1),), interleave=2)
    with pytest.warns(UserWarning, match=r"plan\.interleave is 2 on one grid without plan\.recompute"):
        hyfi_core.parallelize(resnet6(2, width=4), (1, 3, 32, 32), plan, AloneCommunicator(), verify=False)


def test_pieces_need_the_memory_of_one_piece_and_of_what_passes_between_them() -> None:
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
    cuts, peaks = tuple(map(str, range(1, 12))), []
    for more in ({}, {"interleave": 12, "cuts": cuts, "recompute": True}):
        blocks = [
            nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 8, 3, padding=1)) for _ in range(12)
        ]
        model = nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
        plan = ParallelPlan(((1, 1),), **more)  # type: ignore[arg-type]
        engine = hyfi_core.parallelize(model, (2, 3, 64, 64), plan, AloneCommunicator(), verify=False)
        engine.accumulate(images, labels)
        peaks.append(peak_of(lambda engine=engine: engine.accumulate(images, labels)))  # type: ignore[misc]
    assert peaks[1] < 0.4 * peaks[0]


@pytest.mark.soak
def test_interleaved_stages() -> None:
    torch.manual_seed(8)
    cuts = ("layer1", "layer2", "layer3.0", "layer3", "layer4.0")
    plan = ParallelPlan(((1, 2), (2, 1)), cuts, 4, "1f1b", interleave=3)
    assert plan.ranks == 4
    assert_plan_equals_one_process(resnet18(2, width=4), (4, 3, 50, 45), plan)


@pytest.mark.parametrize("strategy", ["data", "model", "spatial", "hybrid"])
def test_strategies_are_plans_by_one_word(strategy: str) -> None:
    model = make("hourglass")[0].double()
    images, labels = torch.randn(4, 3, 37, 45, dtype=torch.float64), torch.tensor([0, 1, 1, 0])

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (4, 3, 37, 45), None, comm, strategy=strategy)  # type: ignore[arg-type]
        return engine.plan, engine.accumulate(images, labels), engine.gather_gradients()

    plan, loss, gradients = run_copies(model, 4, body)[0]
    assert plan.ranks == 4 and (plan.stages == 1 or plan.cuts != "auto")
    wanted = one_process(model, images, labels, plan.microbatches, nn.functional.cross_entropy, identity)
    assert loss == pytest.approx(wanted.loss, abs=1e-12)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-10)


def test_cuts_are_chosen_by_cost_and_within_memory() -> None:
    model = resnet18(2)
    program = capture(model, (1, 3, 512, 512), torch.float32)
    plan = ParallelPlan(((1, 1),) * 3, microbatches=4)
    cuts = with_cuts(plan, program).cuts
    stages = cut_program(program, program.outputs, cuts)
    seconds = [sum(cost.seconds for cost in operator_costs(stage.program)) for stage in stages]
    assert max(seconds) < 0.45 * sum(seconds)  # a third each, as far as modules allow
    heavier = with_cuts(ParallelPlan(((2, 2), (1, 1), (1, 1)), microbatches=4), program)
    first = sum(cost.seconds for cost in operator_costs(cut_program(program, program.outputs, heavier.cuts)[0].program))
    assert first > seconds[0]  # four ranks take more of the work
    with pytest.raises(RequestError, match="memory_bytes is 1,000,000, and no choice of cuts into 3 stages fits"):
        with_cuts(ParallelPlan(((1, 1),) * 3, microbatches=4, memory_bytes=10**6), program)


class Tied(nn.Module):
    """Two stages use one weight, a third has none, and a counter draws the dropout."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.bare = nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Dropout(dropout))
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.second(self.bare(self.first(self.enter(x)))).mean((2, 3)))


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_tied_weights_a_bare_stage_and_tiny_maps(schedule: str) -> None:
    torch.manual_seed(9)
    grids = ((1, 2), (1, 1), (2, 2), (1, 1))
    plan = ParallelPlan(grids, ("first", "bare", "second"), 4, schedule)  # type: ignore[arg-type]
    model = Tied(dropout=0.0)
    assert_plan_equals_one_process(model, (4, 3, 3, 5), plan)  # maps of 2 x 3: two rows of ranks, some own nothing


def test_dropout_is_the_same_on_any_plan() -> None:
    torch.manual_seed(9)
    model = Tied().double()
    batches = make_batches((4, 3, 16, 20), 2, 1)
    cuts = ("first", "bare", "second")
    plans = [
        ParallelPlan(((1, 1),), microbatches=4),
        ParallelPlan(((2, 2),), microbatches=4),
        ParallelPlan(((1, 2), (1, 1), (2, 2), (1, 1)), cuts, 4, "chimera"),
        ParallelPlan(((1, 1),) * 4, cuts, 4, "gpipe", recompute=True),
    ]
    found = [parallel_steps(model, batches, plan, sgd)[0] for plan in plans]
    for other in found[1:]:
        assert_equal_steps(other, found[0])


def test_cumulative_statistics_fold_in_order() -> None:
    torch.manual_seed(10)
    model = make("hourglass")[0]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    plan = plan_of("2+2+1", ("enter", "down1"), "chimera")
    assert_plan_equals_one_process(model, (4, 3, 37, 45), plan, steps=3)


@pytest.mark.parametrize("schedule", ["1f1b", "gems_master"])
def test_another_size_is_captured_once_and_just_works(schedule: str) -> None:
    model, cuts = make("hourglass")
    plan = plan_of("2+2+1", cuts, schedule)

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (4, 3, 37, 45), plan, comm, optimizer=sgd)
        sizes = ((37, 45), (50, 31), (37, 45), (50, 31))
        losses = [engine.train_step(*make_batches((4, 3, *size), 1, 1)[0][0]) for size in sizes]
        return losses, len(engine._runners[0]._cache), engine.gather_state_dict()

    results = run_copies(model.double(), plan.ranks, body)
    assert results[0][1] == 2
    reference = copy.deepcopy(model).double()
    optimizer = sgd(reference.parameters())
    for size, loss in zip(((37, 45), (50, 31), (37, 45), (50, 31)), results[0][0], strict=True):
        images, labels = make_batches((4, 3, *size), 1, 1)[0][0]
        total = 0.0
        for part, targets in zip(images.chunk(4), labels.chunk(4), strict=True):
            share = nn.functional.cross_entropy(reference(part), targets) / 4
            share.backward()
            total += share.item()
        assert loss == pytest.approx(total, abs=1e-9)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(results[0][2][name], value, rtol=1e-8, atol=1e-8)


def test_clipping_is_by_the_norm_over_all_stages() -> None:
    model, cuts = make("hourglass")
    images, labels = make_batches((4, 3, 37, 45), 1, 1)[0][0]

    def body(comm: Any, module: nn.Module, schedule: str) -> Any:
        plan = plan_of("2+2+1", cuts, schedule, mirror="point_to_point" if schedule == "chimera" else "all_reduce")
        engine = hyfi_core.parallelize(module, (4, 3, 37, 45), plan, comm, optimizer=lambda p: torch.optim.SGD(p, 1.0))
        engine.accumulate(images, labels)
        engine.update(max_norm=1e-3)
        return engine.gather_state_dict()

    before = {name: p.detach().clone() for name, p in model.double().named_parameters()}
    for schedule in ("1f1b", "chimera"):
        after = run_copies(model, 5, functools.partial(body, schedule=schedule))[0]
        moved = torch.cat([(after[name] - p).flatten() for name, p in before.items()])
        assert moved.norm() == pytest.approx(1e-3, rel=1e-4)


def test_autocast_travels_in_its_own_type() -> None:
    model, cuts = make("hourglass")
    images, labels = make_batches((4, 3, 64, 64), 1, 1)[0][0]

    def body(comm: Any, module: nn.Module) -> Any:
        plan = plan_of("2+2+1", cuts, "1f1b")
        engine = hyfi_core.parallelize(module, (4, 3, 64, 64), plan, comm, autocast=torch.bfloat16)
        loss = engine.accumulate(images.float(), labels)
        return loss, engine.traffic()["stage"]["bytes"], engine.predict(images.float())

    half = run_copies(model.float(), 5, body, strict=True)
    wanted = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        for part, targets in zip(images.float().chunk(4), labels.chunk(4), strict=True):
            wanted += nn.functional.cross_entropy(model(part), targets).item() / 4
    assert half[0][0] == pytest.approx(wanted, abs=2e-2)
    full = 4 * 4 * 64 * 64 * 4 * 2  # four micro-batches, four channels, float32, to the next stage and to the last
    assert sum(result[1] for result in half[:2]) == full // 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cuts": ("layer2", "layer1")}, "the model runs it earlier"),
        ({"cuts": ("layer2", "layer9")}, "the model has no such module, or it computes nothing; available: layer"),
        (
            {"cuts": ("layer2", "fc")},
            "the model computes nothing after it, so the last stage would be empty; cut earlier",
        ),
    ],
)
def test_wrong_cuts_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    plan = ParallelPlan(((1, 1),) * 3, microbatches=2, **fields)
    with pytest.raises(RequestError, match=message):
        run_ranks(3, lambda comm: hyfi_core.parallelize(resnet10(2, width=4), (2, 3, 64, 64), plan, comm))


def test_what_two_directions_cannot_order_is_refused_by_name() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.fc = nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x).mean((2, 3))
            self.seen.add_(x.detach().mean())
            return self.fc(x)

    plan = ParallelPlan(((1, 1), (1, 1)), ("conv",), 2, "chimera")
    with pytest.raises(
        RequestError,
        match="buffer 'seen' of Counting changes in training, but its updates have no "
        "defined order in a schedule of two directions",
    ):
        run_ranks(
            2,
            lambda c: hyfi_core.parallelize(Counting(), (2, 3, 16, 16), plan, c).accumulate(
                torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.long)
            ),
        )


def test_shared_weights_have_no_single_owner() -> None:
    plan = ParallelPlan(((1, 1),) * 3, ("first", "bare"), 2, "gems_mast", mirror="point_to_point")
    with pytest.raises(RequestError, match="a parameter is used by two stages"):
        run_ranks(3, lambda comm: hyfi_core.parallelize(Tied(), (2, 3, 16, 16), plan, comm))


@pytest.mark.parametrize(
    ("grids", "schedule", "recompute"),
    [
        ("1+1", "1f1b", False),
        pytest.param("2+2+1", "chimera", False, marks=pytest.mark.soak),
        ("4+1", "gpipe", True),
    ],
)
def test_batch_norm_over_replicas_is_that_of_one_larger_batch(grids: str, schedule: str, recompute: bool) -> None:
    model, cuts = make("hourglass")
    model = model.double()
    plan = plan_of(grids, cuts, schedule, replicas=2, sync_batch_norm=True, recompute=recompute)
    batches = make_batches((4, 3, 37, 45), 1, 2)
    found, _ = parallel_steps(model, batches, plan, sgd)
    (a, b), (la, lb) = ([item[part] for item in batches[0]] for part in (0, 1))
    images = torch.stack([a, b], 1).flatten(0, 1)  # micro-batch m of one process: image m of either replica
    wanted = one_process_steps(model, [[(images, torch.stack([la, lb], 1).flatten())]], 4, sgd)
    assert_equal_steps(found, wanted)


def test_point_to_point_takes_no_reduction_over_directions() -> None:
    """The same weights as by all-reduce, and of three single-rank stages nobody reduces anything with anybody."""
    model, _ = make("hourglass")
    batches = make_batches((4, 3, 37, 45), 3, 1)
    found, reductions = [], []
    for mirror in ("all_reduce", "point_to_point"):
        plan = ParallelPlan(((1, 1),) * 3, ("enter", "down1"), 4, "gems_master", mirror=mirror)  # type: ignore[arg-type]
        with mock.patch.object(ReductionGroup, "_start", autospec=True, side_effect=ReductionGroup._start) as start:
            found.append(parallel_steps(model.double(), batches, plan, adamw)[0])
            reductions.append(start.call_count)
    assert reductions[0] > 0 and reductions[1] == 0
    assert_equal_steps(found[1], found[0], tolerance=1e-12)


def test_gradients_are_reduced_inside_nodes_first() -> None:
    model, cuts = make("hourglass")
    plan = plan_of("2+2+1", cuts, "chimera", replicas=2)

    def node() -> str:
        return f"node{int(threading.current_thread().name.removeprefix('rank-')) // 3}"

    with mock.patch("hyfi_core.runtime.groups.node_name", node):
        assert_plan_equals_one_process(model, (4, 3, 37, 45), plan, steps=2)
