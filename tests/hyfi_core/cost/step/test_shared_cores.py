from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hyfi_core.cost.machine import MachineModel, SharedCores
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.step.shared_cores import on_shared_cores
from hyfi_core.cost.step.simulator import forecast_step
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import Simulation, simulate
from tests.hyfi_core.cost.step.test_simulator import program

ONE = (1, 1)


def dry_run(stages: int, microbatches: int) -> Simulation:
    plan, edges = ParallelPlan((ONE,) * stages, microbatches=microbatches), [(s, s + 1) for s in range(stages - 1)]
    placement = Placement.of(plan)
    return simulate(lower(generate(plan, placement), placement, edges), placement, edges)


def test_ranks_with_a_core_each_are_not_slower() -> None:
    run = dry_run(4, 4)
    shared = on_shared_cores(run, [1.0] * 4, SharedCores(4, 1e-9, 1.0))
    assert shared.makespan_s == pytest.approx(run.makespan_s) and shared.busy_s == pytest.approx(run.busy_s)


def test_one_core_does_all_the_work_one_after_the_other() -> None:
    run = dry_run(4, 4)
    shared = on_shared_cores(run, [1.0] * 4, SharedCores(1, 1e-9, 1e-9))
    assert shared.makespan_s == pytest.approx(4 * 4 * 3)  # forwards of 1 s and backwards of 2 s, never idle
    assert max(event.end_s for event in shared.events) == pytest.approx(shared.makespan_s)
    assert [event.name for event in shared.events] == [event.name for event in run.events]


@pytest.mark.parametrize("waiting", [1e-9, 0.25])
def test_ranks_that_wait_take_a_part_of_the_core_on_which_others_compute(waiting: float) -> None:
    run = dry_run(2, 1)  # one of two computes at any time, for 6 s; the other waits
    shared = on_shared_cores(run, [1.0] * 2, SharedCores(1, 1e-9, waiting))
    assert shared.makespan_s == pytest.approx(6.0 * (1 + waiting))


def test_more_ranks_than_cores_forecast_what_cores_can_do() -> None:
    def step_s(machine: MachineModel, **plan: Any) -> float:
        return forecast_step(program(), ParallelPlan(**plan), machine).step_s

    own = replace(reference_machine(), devices_per_node=4)
    two = replace(own, cores=SharedCores(2, 1e-9, 1e-9))
    for plan in ({"grids": (ONE,), "replicas": 4}, {"grids": (ONE,) * 2, "cuts": ("first",), "replicas": 2}):
        assert step_s(own, **plan) < step_s(two, **plan) < 2.01 * step_s(own, **plan)
    assert step_s(two, grids=(ONE,), replicas=4) == pytest.approx(2 * step_s(own, grids=(ONE,), replicas=4), rel=0.05)
    assert step_s(two, grids=(ONE,), replicas=2) == step_s(own, grids=(ONE,), replicas=2)
    turns = replace(own, cores=SharedCores(2, 0.01, 1e-9))
    waited = step_s(turns, grids=((2, 2),), fused_halo=1) - step_s(two, grids=((2, 2),), fused_halo=1)
    assert waited > 6 * 0.01  # halos of two convolutions and sums, forward and backward
