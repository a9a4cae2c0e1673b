"""Maps that leave memory take time only where they take longer than the step computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyfi_core.capture.program import Program
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.simulator import StepForecast, forecast_step
from hyfi_core.cost.step.spilling import NOTHING_SPILLED, SpilledMaps, SpillTimes
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.hyfi_core.cost.step.test_simulator import program

DISK = replace(reference_machine(), disk_bytes_per_s=1e9)
PLAN = ParallelPlan(grids=((1, 1),), cells=(2, 2), spill="/tmp")


def times(
    forward_gb: float, backward_gb: float, plan: ParallelPlan = PLAN, recomputed: tuple[str, ...] = ()
) -> SpillTimes:
    maps = SpilledMaps(1e9 * forward_gb, 1e9 * backward_gb, recomputed)
    return SpillTimes.of(maps, plan, DISK, {"a": 0.5, "b": 0.25}, (1.0, 2.0))


def test_moving_is_hidden_by_what_is_computed_at_the_same_time() -> None:
    assert times(1.0, 2.0).exposed_s == 0.0 and times(1.0, 2.0).moving_s == pytest.approx(3.0)
    assert times(1.5, 2.0).forward_s == pytest.approx(0.5) == times(1.5, 2.0).exposed_s
    assert times(0.5, 2.5).backward_s == pytest.approx(0.5)  # the forward that is left does not help the backward
    assert times(1.5, 2.5).moved_bytes == pytest.approx(4e9)


def test_what_is_computed_again_hides_reading_too() -> None:
    found = times(0.0, 3.0, recomputed=("a", "b", "not of this stage"))
    assert found.again_s == pytest.approx(0.75) and found.backward_s == pytest.approx(0.25)


def test_ranks_of_a_node_share_its_disk() -> None:
    both = replace(PLAN, replicas=2)
    assert times(1.0, 2.0, both).moving_s == pytest.approx(6.0)
    assert times(1.0, 2.0, replace(both, spill="memory")).moving_s == pytest.approx(3e9 * 2 / DISK.memory_bytes_per_s)


def spilling(
    forward_bytes: float, backward_bytes: float, recomputed: tuple[str, ...] = (), **plan: object
) -> StepForecast:
    def spills(program: Program, plan: ParallelPlan, known: LoweredPlans) -> tuple[SpilledMaps, ...]:
        return (SpilledMaps(forward_bytes, backward_bytes, recomputed),)

    one = replace(PLAN, **plan)  # type: ignore[arg-type]
    return forecast_step(program(), one, DISK, spills=spills)


def test_a_step_is_as_much_longer_as_moving_exceeds_computing() -> None:
    free = spilling(0.0, 0.0)
    assert free == forecast_step(program(), PLAN, DISK) and free.exposed_s["spill"] == 0.0
    hidden, slow = spilling(1.0, 1.0), spilling(10e9, 20e9)
    assert hidden.step_s == free.step_s and hidden.moving_s == pytest.approx(2e-9) and hidden.bound_by != "spill"
    assert slow.bound_by == "spill" and slow.moving_s == pytest.approx(30.0) and slow.moved_bytes == 30e9
    assert slow.step_s == pytest.approx(free.step_s + slow.exposed_s["spill"])
    assert 29.0 < slow.exposed_s["spill"] < 30.0 and slow.compute_s == pytest.approx(free.compute_s)
    assert spilling(10e9, 20e9, spill=None).step_s == free.step_s


def test_maps_that_are_computed_again_lengthen_the_step() -> None:
    names = tuple(op.first_output for op in program().operators if op.text == "aten.relu.default")
    free, again = spilling(0.0, 0.0), spilling(0.0, 0.0, names)
    assert len(names) == 2 and again.recomputing_s > 0.0
    assert again.step_s == pytest.approx(free.step_s + again.recomputing_s)
    assert sum(again.compute_s) == pytest.approx(sum(free.compute_s) + again.recomputing_s)


def test_each_micro_batch_moves_its_maps() -> None:
    one, four = spilling(1e9, 1e9), spilling(1e9, 1e9, microbatches=4)
    assert four.moved_bytes == 4 * one.moved_bytes and four.exposed_s["spill"] == pytest.approx(
        4 * one.exposed_s["spill"]
    )
    assert four.moving_s == pytest.approx(4 * one.moving_s)


def test_without_a_store_nothing_is_spilled() -> None:
    assert NOTHING_SPILLED.exposed_s == NOTHING_SPILLED.again_s == NOTHING_SPILLED.moved_bytes == 0.0
