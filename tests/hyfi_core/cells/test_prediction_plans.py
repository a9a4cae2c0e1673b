"""Ways to predict a slide: what fits, what it costs, and that the planned way gives the result of one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.program import Program
from hyfi_core.cells.prediction_plans import PredictionNeeds, prediction_plans
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.step.simulator import forecast_step
from hyfi_core.errors import RequestError
from hyfi_core.models.resnet import resnet6
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once, run_copies

PX = 256


def model() -> nn.Module:
    torch.manual_seed(0)
    return resnet6(2, width=8).eval()


def program() -> Program:
    return captured_once(model(), (1, 3, PX, PX), torch.float32)


def needs(ranks: int = 1, memory_bytes: int = 10**12, **more: Any) -> PredictionNeeds:
    return PredictionNeeds(
        **{"command": "predict", "machine": load_machine("cpu"), **more}, ranks=ranks, memory_bytes=memory_bytes
    )


def test_with_memory_for_all_each_rank_has_its_own_slide() -> None:
    found = prediction_plans(program(), needs(4))
    assert [one.grid for one in found.plans] == [(1, 1), (1, 2), (2, 2)] and found.refused == {}
    assert all(one.cells is None and not one.spills for one in found.plans)
    first, _, last = found.plans
    assert first.each_s < last.each_s and first.slide_s > last.slide_s  # more slides, or one slide sooner
    assert first.groups == 4 and first.each_s == first.slide_s / 4
    assert first.memory_bytes > last.memory_bytes and last.parts_s["sums"] > 0


def test_a_forward_in_evaluation_mode_takes_less_than_a_step() -> None:
    (one,) = prediction_plans(program(), needs()).plans
    trained = captured_once(model().train(), (1, 3, PX, PX), torch.float32)
    step = forecast_step(trained, ParallelPlan(((1, 1),)), load_machine("cpu"))
    assert 0.2 * step.step_s < one.slide_s < 0.5 * step.step_s and one.bound_by == "compute"
    shared = prediction_plans(program(), needs(2)).plans[1]
    together = forecast_step(trained, ParallelPlan(((1, 2),)), load_machine("cpu"))
    assert shared.parts_s["sums"] < together.exposed_s["sums"] / 2  # norms are frozen: only the head sums


def test_with_less_memory_two_ranks_share_a_slide() -> None:
    (free,) = prediction_plans(program(), needs()).plans
    wide = prediction_plans(program(), needs(2, free.memory_bytes - 1))
    assert "1 rank a slide" in wide.refused and wide.plans[0].memory_bytes < free.memory_bytes


def test_nothing_fits_and_the_least_that_would_do_does() -> None:
    with pytest.raises(RequestError, match=r"the smallest needs (\S+) GB: give more memory") as refused:
        prediction_plans(program(), needs(2, 10**5))
    least = float(str(refused.value).split("the smallest needs ")[1].split(" GB")[0])
    assert prediction_plans(program(), needs(2, int(1.01 * least * 1e9))).plans


def test_gpus_that_share_a_slide_have_no_cells() -> None:
    machine = load_machine("h100")
    large = captured_once(model(), (1, 3, 2048, 2048), torch.float32)
    free = {one.grid: one.memory_bytes for one in prediction_plans(large, needs(2, machine=machine)).plans}
    found = prediction_plans(large, needs(2, free[1, 1] - 1, machine=machine))
    assert {one.grid: one.cells is None for one in found.plans} == {(1, 1): False, (1, 2): True}


def test_maps_that_are_large_for_kernels_of_a_gpu_are_in_cells_there() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)).eval()
    large = captured_once(net, (1, 3, 16384, 16384), torch.float32)  # a map of 2³² values
    for machine, cells in (("h100", (2, 2)), ("cpu", None)):
        (alone,) = prediction_plans(large, needs(machine=load_machine(machine))).plans
        assert alone.cells == cells and not alone.spills


def test_validation_shares_slides_in_columns_or_has_cells() -> None:
    found = prediction_plans(program(), needs(4, command="validate")).plans
    assert {(one.grid, one.cells) for one in found} == {((1, 4), None), ((1, 1), (1, 1))}


def test_where_nothing_fits_maps_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyfi_core.cells.prediction_plans._CELLS", (1,))  # as if no number of cells were enough
    large = captured_once(model(), (1, 3, 4096, 4096), torch.float32)
    asked = needs(1, 10**12)
    (free,) = prediction_plans(large, asked).plans
    (one,) = prediction_plans(large, replace(asked, memory_bytes=free.memory_bytes - 1)).plans
    assert one.cells is not None
    assert one.memory_bytes == free.memory_bytes - 1 and one.spills and one.parts_s["spill"] >= 0
    with pytest.raises(RequestError, match="a folder for maps"):
        prediction_plans(large, replace(asked, memory_bytes=free.memory_bytes - 1, spills=False))


@pytest.mark.parametrize("ranks", [1, 2])
def test_planned_ways_give_the_result_of_one_process(ranks: int) -> None:
    net, images = model(), torch.rand(1, 3, PX, PX, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = copy.deepcopy(net)(images)
    found = prediction_plans(program(), needs(ranks)).plans
    for one in found:
        for cells in (one.cells, (2, 2)):
            plan = hyfi_core.ParallelPlan(grids=(one.grid,), cells=cells)

            def body(comm: Communicator, module: nn.Module, plan: ParallelPlan = plan) -> torch.Tensor:
                return hyfi_core.parallelize(module, (1, 3, PX, PX), plan, comm).predict(images)

            for logits in run_copies(net, plan.ranks, body):
                torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
