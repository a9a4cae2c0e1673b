from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.program import Program
from hyfi_core.cells.budget import with_cells
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.memory.forecast import FORECAST_OFF
from hyfi_core.cost.search import plan_family, planner
from hyfi_core.cost.search.cut_candidates import cut_candidates
from hyfi_core.cost.search.plan_bounds import ONE_IN_FLIGHT
from hyfi_core.cost.search.plan_family import PlanRequest, candidates
from hyfi_core.cost.search.planner import ModelStudies, StudiedModel, best_plans
from hyfi_core.cost.step import lowered_stages
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.simulator import StepForecast, forecast_step
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.schedule.in_flight import microbatches_in_flight, recomputes
from tests.harness import captured_once, run_copies

PX = 48


class Narrowing(nn.Module):
    """Work and weights in other places, so that plans differ: wide maps first, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.three = nn.Sequential(nn.Conv2d(16, 64, 3, 2, 1), nn.ReLU())
        self.four = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.four(self.three(self.two(self.one(images)))).mean((2, 3)))
        return answer


@cache
def programs(images: int) -> Program:
    torch.manual_seed(0)
    return captured_once(Narrowing().train(), (images, 3, PX, PX), torch.float32)


def request(ranks: int = 2, batch: int = 2, machine: str = "cpu", **more: Any) -> PlanRequest:
    return PlanRequest(ranks, batch, load_machine(machine), **{"memory_bytes": 10**9, **more})


@pytest.mark.parametrize("machine", ["cpu", "v100-lassen", "bluefield2"])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 2), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("memory_bytes", [10**9, 2_200_000])
def test_the_search_finds_what_trying_every_plan_finds(ranks: int, batch: int, machine: str, memory_bytes: int) -> None:
    asked = request(ranks, batch, machine, memory_bytes=memory_bytes)
    try:
        found = best_plans(programs, asked, top=3)
    except RequestError:
        found = None
    with (
        mock.patch.object(planner._PlanTrials, "bound_s", lambda self, plan: 0.0),
        mock.patch.object(planner._PlanTrials, "cut_bound_s", lambda self, plan: 0.0),
        mock.patch.object(planner._PlanTrials, "waits_s", lambda self, plan: (0.0,) * plan.stages),
        mock.patch.object(planner._PlanTrials, "least_s", lambda self, plan, each_s, update_s: 0.0),
    ):
        if found is None:
            with pytest.raises(RequestError, match="fits into"):
                best_plans(programs, asked, top=3)
            return
        every = best_plans(programs, asked, top=3)
    assert [(one.step_s, one.plan) for one in found.plans] == [(one.step_s, one.plan) for one in every.plans]
    assert found.simulated <= every.simulated <= every.candidates
    assert all(one.plan.ranks == ranks and batch % one.plan.microbatches == 0 for one in found.plans)


def test_of_equal_times_the_first_in_the_family_is_found_whatever_the_bounds() -> None:
    trials, plans = (
        planner._PlanTrials(StudiedModel(programs), request()),
        [ParallelPlan(((1, 2),)), ParallelPlan(((2, 1),))],
    )
    of_all: Any = object()
    queue = [
        planner._Examined(bound_s, (number, 0), plans[number], costs=of_all) for bound_s, number in ((0.5, 1), (1.0, 0))
    ]
    with (
        mock.patch.object(trials, "_queue", lambda plans: queue),
        mock.patch.object(trials, "_forecast", lambda plan: plan),
        mock.patch.object(planner, "step_s", lambda plan, costs: 1.0),
    ):
        found: list[Any] = list(trials.best(plans, 1))
    assert found == plans[:1]


@pytest.mark.parametrize(("ranks", "batch", "machine"), [(4, 4, "cpu"), (4, 8, "v100-lassen"), (6, 8, "p40")])
def test_bounds_are_never_above_what_a_plan_takes(ranks: int, batch: int, machine: str) -> None:
    asked = request(ranks, batch, machine)
    trials = planner._PlanTrials(StudiedModel(programs), asked)
    plans = random.Random(0).sample(list(candidates(asked)), 12)
    for plan in plans:
        forecast = trials._tried(plan)
        assert isinstance(forecast, StepForecast), forecast
        each = programs(batch // plan.replicas // plan.microbatches)
        costs = StageCosts(each, forecast.plan, asked.machine)
        assert 0 < trials.bound_s(plan) <= forecast.step_s
        each_s = [stage.forward_s + stage.backward_s for stage in costs.stages]
        least_s = trials.least_s(forecast.plan, each_s, max(one.update_s for one in costs.stages)) * (1 + 1e-9)
        assert trials.bound_s(plan) <= least_s <= forecast.step_s * (1 + 2e-9)
        assert 0 < trials.cut_bound_s(forecast.plan) <= least_s
        again = replace(forecast.plan, recompute=True)
        recomputed_s = [stage.forward_s + stage.backward_s for stage in StageCosts(each, again, asked.machine).stages]
        bounds_s, _ = trials._bounds.of_stages(again)
        assert all(bound_s <= own_s * (1 + 1e-9) for bound_s, own_s in zip(bounds_s, recomputed_s, strict=True))
        more = any(recomputes(again, stage) for stage in range(again.stages))
        assert (sum(bounds_s) > sum(trials._bounds.of_stages(forecast.plan)[0])) == more


def test_bounds_rise_with_each_stage_that_is_lowered_and_end_at_those_of_all() -> None:
    asked = request(4, 8, "v100-lassen")
    trials = planner._PlanTrials(StudiedModel(programs), asked)
    for plan in (plan for plan in candidates(asked) if plan.stages == 3):
        (one,) = trials._queue([plan])
        known = []
        while one.costs is None:
            (one,) = trials._examined(one)
            known.append(one.bound_s)
        assert known == sorted(known) and known[-1] <= planner.step_s(one.plan, one.costs) * (1 + 1e-9)
        assert len(known) == 1 + 1 + 3
        each = programs(8 // plan.replicas // plan.microbatches)
        assert one.costs.stages == StageCosts(each, one.plan, asked.machine).stages


def test_plans_below_a_limit_are_the_first_of_all() -> None:
    asked = request(3, 4)
    every = best_plans(programs, asked, top=4)
    limit_s = every.plans[2].step_s
    found = best_plans(programs, asked, 4, limit_s)
    assert [one.step_s for one in found.plans] == [one.step_s for one in every.plans if one.step_s < limit_s]
    assert found.simulated <= every.simulated
    assert best_plans(programs, asked, 4, every.plans[0].step_s).plans == ()


def test_less_memory_asks_for_recomputation_or_more_micro_batches_and_then_refuses() -> None:
    ample = best_plans(programs, request(1, 2)).plans[0]
    scarce = request(1, 2, memory_bytes=int(max(ample.memory_bytes) * FORECAST_OFF["cpu"]) - 1)
    (tight,) = best_plans(programs, scarce).plans
    assert max(tight.memory_bytes) < max(ample.memory_bytes) and tight.step_s >= ample.step_s
    assert tight.plan.recompute is True or tight.plan.microbatches > ample.plan.microbatches
    with pytest.raises(RequestError, match=r"the smallest needs .* GB: give more memory"):
        best_plans(programs, request(1, 2, memory_bytes=1000))


def forecasts_of_all_cuts(plan: ParallelPlan, each: Program, asked: PlanRequest) -> list[StepForecast]:
    """Return those that fit, fastest first."""
    names = [candidate.module for candidate in cut_candidates(each)]
    every = [replace(plan, cuts=cuts) for cuts in combinations(names, plan.stages - 1)]
    found = [forecast_step(each, one, asked.machine) for one in every]
    fitting = [
        one for one in found if int(FORECAST_OFF[asked.machine.device] * max(one.memory_bytes)) <= asked.memory_bytes
    ]
    return sorted(fitting, key=lambda one: one.step_s)


@pytest.mark.parametrize(
    ("ranks", "batch", "machine", "share"),
    [(2, 2, "v100-lassen", 0.9), (3, 2, "cpu", 0.82), (3, 4, "h100", 0.75), (3, 4, "bluefield2", 0.7)],
)
def test_where_the_fastest_cuts_do_not_fit_others_are_found(ranks: int, batch: int, machine: str, share: float) -> None:
    (free,) = best_plans(programs, request(ranks, batch, machine)).plans
    off = FORECAST_OFF[load_machine(machine).device]
    asked = request(ranks, batch, machine, memory_bytes=int(share * off * max(free.memory_bytes)))
    (found,) = best_plans(programs, asked).plans
    trials = planner._PlanTrials(StudiedModel(programs), asked)
    fast = trials._with_cuts(replace(found.plan, cuts="auto"))
    assert fast.cuts != found.plan.cuts and not found.plan.recompute
    assert trials._memory.needed_bytes(found.plan) <= asked.memory_bytes < trials._memory.needed_bytes(fast)
    each = programs(batch // found.plan.replicas // found.plan.microbatches)
    assert found.step_s <= 1.02 * forecasts_of_all_cuts(found.plan, each, asked)[0].step_s
    again = forecasts_of_all_cuts(replace(found.plan, recompute=True), each, asked)
    assert found.step_s < again[0].step_s


class Lump(nn.Module):
    """Convolutions of one module, between which a plan cannot cut."""

    def __init__(self, taken: int, channels: int, count: int, stride: int = 1) -> None:
        super().__init__()
        sizes = (taken, *(channels,) * count)
        self.weights = nn.ParameterList(torch.randn(b, a, 3, 3) / 30 for a, b in pairwise(sizes))
        self.stride = stride

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for index, weight in enumerate(self.weights):
            images = nn.functional.conv2d(images, weight, None, 1 if index else self.stride, 1).relu()
        return images


def test_recomputation_with_the_fastest_cuts_may_be_faster_than_other_cuts() -> None:
    """The only cut that fits without leaves nearly everything in the second stage."""
    stages = Lump(3, 8, 1), Lump(8, 8, 12), Lump(8, 64, 5, 4)
    model = nn.Sequential(*stages, nn.Flatten(2), nn.Linear(24**2, 2))

    @cache
    def lumps(images: int) -> Program:
        return captured_once(model.train(), (images, 3, 96, 96), torch.float32)

    plan = ParallelPlan(((1, 1), (1, 1)), microbatches=8)
    (free,) = planner._PlanTrials(StudiedModel(lumps), request(2, 8)).best([plan], top=1)
    asked = request(2, 8, memory_bytes=int(0.99 * FORECAST_OFF["cpu"] * max(free.memory_bytes)))
    again, other = planner._PlanTrials(StudiedModel(lumps), asked).best([plan], top=3)
    assert again.plan == replace(free.plan, recompute=True)
    assert other.plan.cuts != free.plan.cuts and other.plan.recompute is False
    assert free.step_s < again.step_s < other.step_s


def test_where_nothing_fits_maps_may_leave_memory() -> None:
    """The limit is that of the whole process; the least that a refusal names is enough, and `cells: auto` agrees."""

    @cache
    def large(images: int) -> Program:
        return captured_once(Narrowing().train(), (images, 3, 2048, 2048), torch.float32)

    def asked(memory_bytes: float) -> PlanRequest:
        return request(1, 1, memory_bytes=int(memory_bytes), held_bytes=400_000_000, spill="memory")

    (whole,) = best_plans(large, asked(8e9)).plans
    assert whole.plan.spill is None
    found = best_plans(large, asked(0.4e9 + 0.9 * max(whole.memory_bytes))).plans[0].plan
    assert found.cells is not None and found.spill == "memory"
    with pytest.raises(RequestError, match="the smallest needs") as refused:
        best_plans(large, asked(0.42e9))
    least = float(re.search(r"needs ([\d.]+) GB", str(refused.value))[1]) * 1.01e9  # type: ignore[index]
    for one in best_plans(large, asked(least)).plans:
        assert one.plan.memory_bytes == int(least)
        limits = replace(one.plan, cells="auto")
        assert with_cells(limits, large(1), 400_000_000, torch.device("cpu")).cells is not None


def test_the_obvious_alternatives_are_judged() -> None:
    found = best_plans(programs, request(4, 4))
    assert set(found.alternatives) == {"data parallel", "spatial only", "layer parallel", "pipeline"}
    for other in found.alternatives.values():
        assert isinstance(other, StepForecast) and other.step_s >= found.plans[0].step_s
    layer = found.alternatives["layer parallel"]
    assert isinstance(layer, StepForecast) and layer.plan.schedule == "sequential" and layer.bubble > 0.5
    odd = best_plans(programs, request(2, 1)).alternatives["data parallel"]
    assert odd == "a batch of 1 cannot be divided among 2 replicas"


def test_a_model_that_cannot_be_cut_says_why() -> None:
    def refuse(*given: Any) -> StepForecast:
        raise RequestError("aten.foo has no rule")

    with mock.patch.object(planner, "with_cuts", refuse), pytest.raises(RequestError, match=r"aten\.foo has no"):
        best_plans(programs, request(2, 2))


def test_plans_that_are_returned_run() -> None:
    def body(plan: ParallelPlan, batch: int) -> list[float]:
        def train(comm: Communicator, model: nn.Module) -> float:
            each = batch // plan.replicas
            engine = hyfi_core.parallelize(model, (each, 3, PX, PX), plan, comm)
            return engine.accumulate(torch.ones(each, 3, PX, PX), torch.zeros(each, dtype=torch.long))

        return run_copies(Narrowing().train(), plan.ranks, train)

    for ranks, batch, machine in ((2, 2, "cpu"), (3, 2, "v100-lassen"), (4, 4, "bluefield2")):
        for found in best_plans(programs, request(ranks, batch, machine), top=3).plans:
            losses = body(found.plan, batch)
            assert len(set(losses)) == 1 and losses[0] > 0


def test_many_ranks_are_planned_by_patterns() -> None:
    plans = list(candidates(request(2048, 2048, "v100-lassen")))
    assert len(plans) == len(set(plans)) < 8000
    assert {plan.ranks for plan in plans} == {2048}


def test_schedules_with_one_micro_batch_in_flight_have_no_more() -> None:
    for schedule in ONE_IN_FLIGHT:
        plan = ParallelPlan(((1, 1),) * 3, microbatches=8, schedule=schedule)  # type: ignore[arg-type]
        assert [microbatches_in_flight(plan, stage) for stage in range(3)] == [1, 1, 1]


def test_stages_that_plans_share_cost_what_they_cost_alone() -> None:
    """One memory of lowered stages for plans of many grids, cuts and margins gives what lowering each anew gives."""
    machine, known, lowered = load_machine("v100-lassen"), LoweredPlans(), list[object]()
    grids: tuple[tuple[tuple[int, int], ...], ...] = (((2, 2),), ((2, 2), (1, 2)), ((2, 2), (1, 1)), ((1, 2), (2, 2)))
    real = lowered_stages._lower_stage
    with mock.patch.object(lowered_stages, "_lower_stage", side_effect=lambda *a: lowered.append(a) or real(*a)):
        for images, halo, some, replicas in product((1, 2), (1, 2, "auto"), grids, (1, 4)):
            for cut in ("one", "two") if len(some) > 1 else ("auto",):
                cuts: Any = "auto" if cut == "auto" else (cut,)
                plan = ParallelPlan(grids=some, cuts=cuts, fused_halo=halo, replicas=replicas)
                program, count = programs(images), len(lowered)
                shared = StageCosts(program, plan, machine, None, known)
                shared_count, alone = len(lowered) - count, StageCosts(program, plan, machine)
                assert (shared.stages, shared.edges) == (alone.stages, alone.edges)
                assert shared_count == 0 or replicas == 1  # replicas do not change a stage


def test_searches_that_share_a_study_find_what_they_find_alone() -> None:
    studies = ModelStudies(programs)
    for ranks in (4, 2, 1):
        asked = request(ranks, 4, "v100-lassen")
        assert best_plans(programs, asked, 3, studies=studies) == best_plans(programs, asked, 3)


def test_many_ranks_are_divided_into_equal_stages_halving_ones_and_one_large_grid_before_single_ranks() -> None:
    divisions = list(plan_family._compositions(12))
    assert {(12,), (6, 6), (4, 4, 4), (3, 3, 3, 3), (2,) * 6} <= set(divisions)  # equal
    assert {(11, 1), (10, 1, 1), (5,) + (1,) * 7} <= set(divisions)  # a large grid before single ranks
    assert {(6, 6), (6, 3, 3), (6, 3, 2, 1)} <= set(divisions)  # halving
    assert all(sum(sizes) == 12 and min(sizes) > 0 for sizes in divisions)
    assert max(len(sizes) for sizes in divisions) == 8 and (5, 7) not in divisions
