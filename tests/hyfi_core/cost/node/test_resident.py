from __future__ import annotations

from typing import Any

from hyfi_core.cost.machine import load_machine
from hyfi_core.cost.memory import microbatches_in_flight
from hyfi_core.cost.node.resident import kept_bytes
from hyfi_core.cost.simulator import forecast_step, rank_bytes
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.hyfi_core.cost.test_simulator import program


def kept(maps_bytes: int, **plan: Any) -> int:
    return kept_bytes(program(), ParallelPlan(grids=((1, 1),), **plan), (maps_bytes,))[0]


def test_a_heap_keeps_holes_between_maps_and_messages_need_buckets() -> None:
    assert kept(10_000_000) - kept(0) == 3_000_000
    assert kept(0, replicas=2) - kept(0) >= 2 * (4 << 20)
    largest = 32 * 32 * 25 * 4
    assert kept(0) == 4 * largest + 80_000 * len(program().operators)


def test_only_a_process_on_a_cpu_keeps_what_is_freed() -> None:
    plan = ParallelPlan(grids=((1, 1),))
    needed = rank_bytes(program(), plan)
    assert forecast_step(program(), plan, load_machine("h100")).resident_bytes == needed
    assert forecast_step(program(), plan, load_machine("cpu")).resident_bytes[0] > needed[0]


def test_each_direction_has_half_of_the_microbatches() -> None:
    plan = ParallelPlan(grids=((1, 1), (1, 1)), cuts=("first",), microbatches=2, schedule="chimera")
    assert [microbatches_in_flight(plan, stage) for stage in range(2)] == [1, 1]
