"""Parallel branches on different ranks: equal to one process, for any division, with every other dimension."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import lowered_operators
from hyfi_core.models.amoebanet import AmoebaCell
from hyfi_core.plan.branches import Branches
from tests.conftest import MPIEXEC, PROGRAM_PATH
from tests.harness import Result, compare, identity, one_process, parallel, run_copies
from tests.patience import PATIENCE_S
from tests.steps import (
    assert_equal_steps,
    assert_plan_equals_one_process,
    make_batches,
    one_process_steps,
    parallel_steps,
    sgd,
)

Plan = hyfi_core.ParallelPlan
ONE = (1, 1)


def _unit(before: int, after: int, kernel: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )


class Mixed(nn.Module):
    """An Inception module: four branches, of which one divides again; concatenated, or added."""

    def __init__(self, before: int, channels: int, adds: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.one = _unit(before, channels)
        self.three = nn.Sequential(_unit(before, 4), _unit(4, channels, 3))
        self.five = nn.Sequential(_unit(before, 4), _unit(4, channels, 5), nn.Dropout(dropout))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _unit(before, channels))
        self.adds = adds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.one(x), self.three(x), self.five(x), self.pool(x)]
        return parts[0] + parts[1] * parts[2] + parts[3] if self.adds else torch.cat(parts, 1)


class SmallInception(nn.Module):
    """A stem, three modules, of which one adds its branches, and a head; dropout inside and outside of branches."""

    def __init__(self, dropout: float = 0.0, classes: int = 3) -> None:
        super().__init__()
        self.stem = _unit(3, 4, 3)
        self.first = Mixed(4, 3, dropout=dropout)
        self.drop = nn.Dropout(dropout)
        self.second = Mixed(12, 4, adds=True)
        self.third = Mixed(4, 2)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.drop(self.first(self.stem(x))))
        return self.fc(self.third(x).mean((2, 3)))  # type: ignore[no-any-return]


def _data(batch: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn((batch, 3, size, size), dtype=torch.float64, generator=generator)
    return images, torch.randint(0, 3, (batch,), generator=generator)


def _model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def _assert_equal(model: nn.Module, plan: Plan, batch: int = 2, size: int = 12) -> Result:
    images, labels = _data(batch, size)
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, plan.microbatches, F.cross_entropy, identity))
    return found


@pytest.mark.parametrize("planes", [2, 3])
def test_the_branches_of_inception_modules(planes: int) -> None:
    found = _assert_equal(_model(SmallInception), Plan((ONE,), branches=planes))
    assert all(counts["stage"]["bytes"] > 0 for counts in found.traffic), "every plane must have had a branch"


class SmallCells(nn.Module):
    """AmoebaNet's cells, a normal and a reducing one, each of which takes the maps of the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(3, 8, 3)
        self.normal = AmoebaCell(8, 8, 8, reduction=False, older_is_larger=False)
        self.reducing = AmoebaCell(8, self.normal.outputs, 8, reduction=True, older_is_larger=False)
        self.fc = nn.Linear(self.reducing.outputs, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.stem(x)
        second = self.normal(first, first)
        return self.fc(self.reducing(second, first).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("planes", [2, 3])
def test_the_branches_of_amoebanet_cells(planes: int) -> None:
    found = _assert_equal(_model(SmallCells), Plan((ONE,), branches=planes))
    assert all(counts["stage"]["bytes"] > 0 for counts in found.traffic)


PLANS = {
    "replicas": Plan((ONE,), branches=2, replicas=2),
    "pipeline": Plan((ONE, ONE), ("first",), 2, branches=2),
    "three planes, pipeline, replicas": Plan((ONE, ONE), ("second",), 2, "gpipe", branches=3, replicas=2),
    "grids": Plan(((2, 1), (1, 2)), ("first",), 2, branches=2),
    "recomputed": Plan(((1, 2), ONE), ("first",), 2, branches=2, recompute=True),
    "two directions": Plan((ONE, ONE), ("second",), 2, "chimera", branches=2),
    "two directions, one owner": Plan((ONE, ONE), ("second",), 2, "gems_master", branches=2, mirror="point_to_point"),
    "virtual stages": Plan((ONE, ONE), ("stem", "first", "second"), 2, interleave=2, branches=2),
}


LONG = ("three planes, pipeline, replicas", "recomputed", "two directions, one owner")


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.soak] * (one in LONG)) for one in PLANS])
def test_branches_with_other_dimensions(name: str) -> None:
    """Three steps of SGD with momentum: losses, first gradients, weights, running statistics, momenta."""
    plan = PLANS[name]
    release = name == "pipeline"  # ranks without weights of other stages
    assert_plan_equals_one_process(_model(SmallInception), (2, 3, 12, 12), plan, steps=3, release=release)


def test_heads_of_attention() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taken = nn.Linear(6, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.taken(x).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 6, 4, 4)
            self.heads = nn.ModuleList(Head() for _ in range(3))
            self.fc = nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x).flatten(2).transpose(1, 2)
            return self.fc(torch.cat([head(x) for head in self.heads], -1).mean(1))  # type: ignore[no-any-return]

    _assert_equal(_model(Heads), Plan((ONE,), branches=3))


class OddBranches(nn.Module):
    """Branches of which two share weights, one is frozen, one has no gradient, and one gives whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(3, 4, 3)
        self.shared, self.frozen, self.detached = (nn.Conv2d(4, 4, 5, padding=2) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.own = nn.ModuleList(_unit(4, 4, 3) for _ in range(3))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        one, other = self.own[0](self.shared(x)), self.shared(self.own[1](x))
        with torch.no_grad():
            apart = torch.sigmoid(self.detached(x)) > 0.5
        y = one * other + self.own[2](self.frozen(x)) * apart
        return self.fc(y.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("planes", [2, 4])
def test_shared_and_frozen_weights_and_branches_without_gradient(planes: int) -> None:
    _assert_equal(_model(OddBranches), Plan((ONE,), branches=planes))
    for seed in range(2):
        with mock.patch("hyfi_core.cost.branch_packing.pack_branches", _at_random(seed)):
            _assert_equal(_model(OddBranches), Plan((ONE,), branches=planes))


@pytest.mark.soak
@pytest.mark.parametrize("planes", [2, 3])
def test_amoebanet_cells_in_a_pipeline_of_two_replicas(planes: int) -> None:
    plan = Plan((ONE, ONE), ("normal",), 2, branches=planes, replicas=2)
    assert_plan_equals_one_process(_model(SmallCells), (2, 3, 12, 12), plan, steps=2)


class DetachedBranch(nn.Module):
    """A branch that is detached: one process gives its weights no gradient, and no weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(3, 4, 3)
        self.own, self.detached = (nn.Conv2d(4, 4, 5, padding=2) for _ in range(2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = torch.cat([self.own(x), self.detached(x).detach()], 1)
        return self.fc(y.mean((2, 3)))  # type: ignore[no-any-return]


def test_weights_of_a_detached_branch_get_no_gradient_from_the_plane_that_detaches_it() -> None:
    """Which plane computes the branch, and which detaches it, are drawn."""
    for seed in range(3):
        with mock.patch("hyfi_core.cost.branch_packing.pack_branches", _at_random(seed)):
            assert_plan_equals_one_process(_model(DetachedBranch), (2, 3, 9, 9), Plan((ONE,), branches=2), steps=2)


class SummedBranches(nn.Module):
    """The sum of six branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(3, 4, 3)
        self.branches = nn.ModuleList(nn.Conv2d(4, 4, 5, padding=2) for _ in range(6))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        total = self.branches[0](x)
        for branch in self.branches[1:]:
            total = total + branch(x)
        return self.fc(total.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_sum_of_branches_is_sent_as_one_value() -> None:
    found = _assert_equal(_model(SummedBranches), Plan((ONE,), branches=2))
    map_bytes = 2 * 4 * 12 * 12 * 8
    assert [counts["stage"]["bytes"] for counts in found.traffic] == [2 * map_bytes] * 2  # a cotangent comes for each
    three = _assert_equal(_model(SummedBranches), Plan((ONE,), branches=3))
    assert [counts["stage"]["bytes"] for counts in three.traffic] == [4 * map_bytes] * 3


def _at_random(seed: int) -> Callable[..., Branches]:
    """Return a division for which there is no reason: any operator in any plane, or in all, in the program's order."""

    def pack(program: Any, outputs: Any, exits: Any, planes: int, *rest: Any) -> Branches:
        names, draw = [op.name for op in lowered_operators(program, outputs, exits)], random.Random(seed)
        owners = {name: draw.randrange(planes) for name in names if draw.random() < 0.7}
        return Branches(planes, (tuple(names),), owners)

    return pack


@pytest.mark.parametrize("seed", range(4))
def test_any_division_is_exact(seed: int) -> None:
    """Also those in which a plane sends values in the middle of a branch, and nothing at its end."""
    plan = Plan(((1, 2),) if seed % 2 else (ONE,), branches=2 + seed // 2)
    with mock.patch("hyfi_core.cost.branch_packing.pack_branches", _at_random(seed)):
        _assert_equal(_model(SmallInception), plan)


def test_dropout_draws_the_same_numbers_with_and_without_branches() -> None:
    results = []
    for branches in (1, 2):
        torch.manual_seed(3)
        model = _model(lambda: SmallInception(dropout=0.5))
        results.append(parallel(model, *_data(2), Plan((ONE,), branches=branches), F.cross_entropy, None))
    compare(*results)


def test_batch_norm_over_replicas() -> None:
    model, batches = _model(SmallInception), make_batches((1, 3, 12, 12), 2, 2)
    found, _ = parallel_steps(model, batches, Plan((ONE,), replicas=2, branches=2, sync_batch_norm=True), sgd)
    together = [[tuple(torch.cat(parts) for parts in zip(*step, strict=True))] for step in batches]
    assert_equal_steps(found, one_process_steps(model, together, 1, sgd))  # type: ignore[arg-type]


@pytest.mark.parametrize("memory_format", ["as_given", "channels_last"])
def test_values_keep_type_and_format_between_planes(memory_format: Any) -> None:
    """Under autocast branches end in bfloat16: both plans round alike, so they agree far better than bfloat16 does."""
    images, labels = (given.float() if given.is_floating_point() else given for given in _data(2))

    def body(plan: Plan) -> Callable[[Any, nn.Module], Any]:
        def run(comm: Any, module: nn.Module) -> Any:
            how: Any = {"autocast": torch.bfloat16, "memory_format": memory_format}
            engine = hyfi_core.parallelize(module, (2, 3, 12, 12), plan, comm, **how)
            return engine.accumulate(images, labels), engine.gather_gradients()

        return run

    torch.manual_seed(0)
    model = SmallInception()
    alone = run_copies(model, 1, body(Plan((ONE,))))[0]
    found = run_copies(model, 2, body(Plan((ONE,), branches=2)))[0]
    assert found[0] == pytest.approx(alone[0], rel=1e-4)
    for name, gradient in alone[1].items():
        assert (found[1][name] - gradient).norm() <= 0.02 * gradient.norm() + 1e-4, name


PROGRAM = """
import hyfi_core
from hyfi_core import ParallelPlan
from tests.steps import Steps, assert_equal_steps, make_batches, one_process_steps, sgd
from tests.test_branches import OddBranches, _model

comm = hyfi_core.init()
for plan in (ParallelPlan(((1, 1),), replicas=2, branches=2), ParallelPlan(((2, 1),), branches=2)):
    model, reference, batches = _model(OddBranches), _model(OddBranches), make_batches((2, 3, 12, 12), 2, plan.replicas)
    engine = hyfi_core.parallelize(model, (2, 3, 12, 12), plan, comm, optimizer=sgd, verify=False)
    losses, gradients = [], None
    for index, step in enumerate(batches):
        losses.append(engine.accumulate(*step[comm.rank // plan.ranks_per_replica]))
        gradients = engine.gather_gradients() if index == 0 else gradients
        engine.update()
    state = engine.gather_state_dict()
    if comm.rank == 0:
        wanted = one_process_steps(reference, batches, 1, sgd)
        found = Steps(losses, gradients, state, {})
        assert_equal_steps(found, Steps(wanted.losses, wanted.gradients, wanted.state, {}))
        print("equal", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
def test_processes_train_as_one() -> None:
    environment = {**os.environ, "PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"}
    command = [str(MPIEXEC), "-n", "4", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal", "equal"]


def _refused(model: nn.Module, plan: Plan, message: str) -> None:
    def body(comm: Any, module: nn.Module) -> None:
        hyfi_core.parallelize(module, (2, 3, 12, 12), plan, comm, verify=False)

    with pytest.raises(RequestError, match=message):
        run_copies(model, plan.ranks, body)


def test_refusals() -> None:
    row = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    _refused(row, Plan((ONE,), branches=2), r"no parallel branches.*branches=1, with plan.grids or plan.replicas")

    class Noisy(SmallInception):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.rrelu(x, training=True))

    _refused(Noisy(), Plan((ONE,), branches=2), r"aten.rrelu.* torch's generator.*plan.branches=1")


def test_contributions_need_whole_planes() -> None:
    def body(comm: Any, module: nn.Module) -> None:
        engine = hyfi_core.parallelize(module, (2, 3, 12, 12), Plan((ONE,), branches=2), comm)
        engine.explain(_data(2)[0])

    with pytest.raises(RequestError, match=r"plan.branches=1"):
        run_copies(_model(SmallInception), 2, body)
