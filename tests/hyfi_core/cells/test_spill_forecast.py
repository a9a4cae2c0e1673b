"""What a plan is forecast to move before a run is about what the run moves."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import hyfi_core
from hyfi_core.capture.autocast import under_autocast
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cells import paging
from hyfi_core.cells.page_forecast import PagedForecast
from hyfi_core.cells.spill_forecast import SpillForecast, _spilled
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.cost.machines.machine_file import load_machine, reference_machine
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.planner import best_plans
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.errors import MemoryLimitError, RequestError
from hyfi_core.models.resnet import resnet10, resnet18
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.hyfi_core.cells.test_page_forecast import Noise

MB = 10**6
PLAN = ParallelPlan(grids=((1, 1),), cells=(2, 2), spill="memory")


@cache  # a search of plans asks for the same program again and again
def small(side: int = 512, images: int = 1) -> Program:
    return capture(resnet10(2, width=16).train(), (images, 3, side, side), torch.float32)


def small_at_1024(images: int) -> Program:
    return small(1024, images)


@pytest.mark.parametrize(
    ("size", "cells", "limit_bytes"),
    [
        (512, 2, 35 * MB),
        pytest.param(1024, 4, 30 * MB, marks=pytest.mark.soak),
        pytest.param(1024, 4, 80 * MB, marks=pytest.mark.soak),
        pytest.param(1024, 4, 150 * MB, marks=pytest.mark.soak),
    ],
)
def test_a_step_moves_what_was_forecast(
    size: int, cells: int, limit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "page_limit", lambda *given: limit_bytes)
    plan = ParallelPlan(((1, 1),), cells=(cells, cells), spill=str(tmp_path))
    torch.manual_seed(0)
    model = resnet18(2)
    program = capture(model, (1, 3, size, size), torch.float32)
    (maps,) = SpillForecast(reference_machine(), pages_bytes=limit_bytes)(program, plan, LoweredPlans())
    engine = hyfi_core.parallelize(model, (1, 3, size, size), plan, AloneCommunicator(), verify=False)
    engine.accumulate(Noise(), torch.tensor([0]))
    counts = engine.spilled()
    assert counts is not None
    moved = counts.written_bytes + counts.read_bytes
    assert 0.65 * moved < maps.forward_bytes + maps.backward_bytes < 1.5 * moved


def test_more_memory_moves_less() -> None:
    program, forecast = small(), SpillForecast(reference_machine(), 100 * MB)
    with pytest.raises(MemoryLimitError, match="a rank needs at least") as refused:
        forecast(program, replace(PLAN, memory_bytes=50 * MB), LoweredPlans())
    moved = []
    for more_bytes in (0, 2 * MB, 5 * MB, 10 * MB, 100 * MB):
        (maps,) = forecast(program, replace(PLAN, memory_bytes=refused.value.least_bytes + more_bytes), LoweredPlans())
        moved.append(maps.forward_bytes + maps.backward_bytes)
    assert moved == sorted(moved, reverse=True) and moved[0] > moved[1] > 0.0 == moved[-1]
    (half_of_an_h100,) = SpillForecast(load_machine("h100"))(program, PLAN, LoweredPlans())
    assert half_of_an_h100.forward_bytes == half_of_an_h100.backward_bytes == 0.0


def test_inputs_that_find_no_room_in_all_cells_are_read_again() -> None:
    loose = PagedForecast(working_bytes=10, kept_bytes=1000, waits=((100, 100),))
    (ample, tight) = (_spilled(loose, [loose], limit, cells=4) for limit in (10**6, 410))
    assert (ample.forward_bytes, ample.backward_bytes) == (0.0, 0.0)
    stored = 1000 - int(0.41 * 400)
    room = 0.75 * 410 - 10
    assert tight.forward_bytes == pytest.approx(stored + 400 - room)
    assert tight.backward_bytes == pytest.approx(stored + (800 - room) * 1.5)  # cotangents are written, too


def test_micro_batches_in_flight_share_the_memory() -> None:
    plan, forecast = replace(PLAN, microbatches=4), SpillForecast(reference_machine(), pages_bytes=12 * MB)
    (alone,), (together,) = (
        forecast(small(), replace(plan, schedule=way), LoweredPlans()) for way in ("1f1b", "gpipe")
    )
    assert together.forward_bytes > alone.forward_bytes  # all four are kept at the same time
    assert together.recomputed == alone.recomputed and len(alone.recomputed) > 5


def test_stages_spill_their_own_maps() -> None:
    plan = replace(PLAN, grids=((1, 1), (1, 1)), cuts=("layer2",))
    first, second = SpillForecast(reference_machine(), pages_bytes=4 * MB)(small(), plan, LoweredPlans())
    assert first.forward_bytes > second.forward_bytes
    assert not {*first.recomputed} & {*second.recomputed}


def test_bfloat16_moves_less() -> None:
    programs = small(), under_autocast(small(), torch.bfloat16, "cpu")
    forecast = SpillForecast(reference_machine(), pages_bytes=MB)
    (wide,), (narrow,) = (forecast(program, PLAN, LoweredPlans()) for program in programs)
    assert 0 < narrow.forward_bytes < 0.7 * wide.forward_bytes


def test_the_planner_counts_moving_when_it_chooses_the_cells() -> None:
    slow_disk = replace(reference_machine(), disk_bytes_per_s=1e6, devices_per_node=1)
    forecast = SpillForecast(slow_disk, 100 * MB, pages_bytes=2 * MB)
    free = PlanRequest(1, 1, slow_disk, 236 * MB, 100 * MB, spill="/tmp")
    fast, slow = (best_plans(small_at_1024, one, 4).plans for one in (free, replace(free, spills=forecast)))
    assert all(one.exposed_s["spill"] == 0.0 for one in fast) and all(one.exposed_s["spill"] > 0.0 for one in slow)
    assert slow[0].bound_by == "spill" and slow[0].step_s > fast[0].step_s
    assert [one.step_s for one in slow] == sorted(one.step_s for one in slow)


def test_the_least_memory_that_a_refused_search_names_is_enough() -> None:
    forecast = SpillForecast(reference_machine(), 100 * MB)
    asked = PlanRequest(1, 1, reference_machine(), 120 * MB, 100 * MB, spill="/tmp", spills=forecast)
    with pytest.raises(RequestError, match="the smallest needs") as refused:
        best_plans(small_at_1024, asked)
    least = float(re.search(r"needs ([\d.]+) GB", str(refused.value))[1])  # type: ignore[index]
    (found,) = best_plans(small_at_1024, replace(asked, memory_bytes=int(1.01e9 * least))).plans
    assert found.plan.spill == "/tmp" and found.moved_bytes > 0.0
