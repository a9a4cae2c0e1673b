"""What is found with a few ranks that represent all is what is found with all ranks."""

from __future__ import annotations

import random

import pytest

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule import lower as lowering
from hyfi_core.schedule import simulate as simulation
from hyfi_core.schedule.action import Schedule
from hyfi_core.schedule.fault import ScheduleError
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.symmetry import Representatives, represented
from tests.hyfi_core.schedule import cases
from tests.hyfi_core.schedule.cases import Case, draw_case, plant


def all_of_them(schedule: Schedule, placement: Placement, partners: bool) -> Representatives:
    """Every rank represents itself."""
    return Representatives(schedule, placement, tuple(range(placement.size)))


@pytest.fixture
def large_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "GRIDS", ((1, 1), (1, 3), (2, 2), (3, 2), (1, 5)))


def slowly(monkeypatch: pytest.MonkeyPatch, case: Case) -> Schedule:
    with monkeypatch.context() as patched:
        patched.setattr(lowering, "represented", all_of_them)
        return case.lowered()


def error_of(case: Case, schedule: Schedule) -> str | None:
    try:
        case.validate(schedule)
    except ScheduleError as error:
        return str(error)
    return None


@pytest.mark.usefixtures("large_grids")
@pytest.mark.parametrize("seed", range(8))
def test_lists_and_faults_are_those_of_all_ranks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(seed)
    fewer = faults = 0
    for _ in range(25):
        case = draw_case(generator.randint)
        lowered = case.lowered()
        assert lowered == slowly(monkeypatch, case)
        few = represented(lowered, case.placement, case.mirror == "point_to_point")
        fewer += few.placement.size < case.placement.size
        assert few.for_all(few.schedule.actions) == lowered
        planted = plant(case, lowered, generator.randint)
        for schedule in (lowered, *([] if planted is None else [planted.schedule])):
            found = error_of(case, schedule)
            with monkeypatch.context() as patched:
                patched.setattr(simulation, "represented", all_of_them)
                assert found == error_of(case, schedule)
            faults += found is not None
    assert fewer > 5 and faults > 5


@pytest.mark.parametrize(("schedule", "mirror"), [("1f1b", "all_reduce"), ("chimera", "point_to_point")])
def test_the_number_of_representatives_does_not_depend_on_the_grids(schedule: str, mirror: str) -> None:
    sizes = set()
    for side in (3, 8):
        plan = ParallelPlan(((side, side),) * 4, schedule=schedule, microbatches=4, mirror=mirror)  # type: ignore[arg-type]
        placement = Placement.of(plan)
        few = represented(generate(plan, placement), placement, mirror == "point_to_point")
        sizes.add(few.placement.size)
    assert len(sizes) == 1 and sizes.pop() <= 16
