from __future__ import annotations

import pytest

from hyfi_core.comm.alone import AloneCommunicator
from workflows.training.bound_by import KINDS, RunSetup, StepTime, bound_by, percentages, shares

NONE = dict.fromkeys(KINDS, 0.0)
SETTING = RunSetup(ranks=2, loaders=2, validators=0, policy="all")


def rank(**seconds: float) -> dict[str, float]:
    return {**NONE, **seconds}


@pytest.mark.parametrize(
    ("spent", "begins"),
    [
        ([rank(compute=9.7, halo=0.3)], "compute-bound: 97 % computing"),
        ([rank(compute=9, reduce=1)], "compute-bound: 90 % computing"),  # a tenth bounds nothing
        (
            [rank(compute=6.2, wait=3.8)],
            "loader-bound: 38 % waiting; add 2 loaders (roles.loaders=4) or simpler data.augment",
        ),
        ([rank(compute=6, halo=4), rank(compute=6, halo=4)], "halo-bound: 40 % exchanging halos"),
        ([rank(compute=6, stage=4)], "pipeline-bound: 40 %"),
        ([rank(compute=6, reduce=4)], "reduction-bound: 40 %"),
        ([rank(compute=7, validation=3)], "validation-bound: 30 % validating; add a validator (roles.validators=1)"),
        ([rank(compute=6, spill=4)], "spill-bound: 40 % spilling; raise plan.memory_bytes, or use a faster disk"),
        ([rank(compute=7, save=3)], "disk-bound: 30 % saving"),
        ([rank(compute=5, halo=5), rank(compute=10)], "bound by the slowest rank: 25 %"),
    ],
)
def test_the_largest_share_names_the_knob(spent: list[dict[str, float]], begins: str) -> None:
    assert bound_by(spent, SETTING).startswith(begins)


def test_planes_wait_for_each_other() -> None:
    line = bound_by([rank(compute=6, stage=4)], RunSetup(2, 2, 0, "all", planes=2))
    assert line.startswith("bound by values of other ranks: 40 %") and "plan.branches" in line


def test_who_waits_for_data_makes_others_wait_for_halos() -> None:
    """Rank 1 has no data for 4 of 10 seconds; that rank 0 meets this in its exchanges must not hide the cause."""
    spent = [rank(compute=5.5, halo=4.5), rank(compute=5.5, wait=4.0, halo=0.5)]
    assert shares(spent)["halo"] == pytest.approx(0.05)
    assert bound_by(spent, SETTING).startswith("loader-bound: 40 %")


def test_percentages_sum_to_a_hundred() -> None:
    spent = [rank(compute=1, halo=1, wait=1), rank(compute=2, reduce=1, validation=4), rank(save=1, stage=6)]
    for some in (spent, spent[:1], spent[1:], [rank(compute=1)]):
        assert sum(percentages(some).values()) == 100
    assert percentages([rank()])["compute"] == 0
    even = [rank(compute=5, halo=5), rank(compute=10)]
    assert {name: part for name, part in percentages(even).items() if part} == {"compute": 75, "imbalance": 25}


def test_a_figure_that_is_not_the_mean_says_whose_it_is() -> None:
    """One trainer validates 88 % of its time, the other 68 %: 88 % in front of a mean of 78 % reads as a mistake."""
    line = bound_by([rank(compute=3.2, validation=6.8), rank(compute=1.2, validation=8.8)], SETTING)
    assert line.startswith("validation-bound: 88 % validating on trainer 1; ")
    assert line.endswith("[mean of 2 trainers: computing 22 %, validating 78 %]")
    alike = bound_by([rank(compute=2, validation=8)] * 2, SETTING)
    assert alike.startswith("validation-bound: 80 % validating; ")
    thirds = bound_by([rank(compute=1, halo=1, reduce=1)] * 2, SETTING)  # rounded once, not twice
    assert "33 % exchanging halos; " in thirds and "exchanging halos 33 %" in thirds


def test_validators_that_are_behind() -> None:
    late = [rank(compute=5, validation=5)]
    assert "validation.policy=latest" in bound_by(late, RunSetup(1, 1, 1, "all"))
    assert "roles.validators" not in bound_by(late, RunSetup(1, 1, 1, "latest"))
    spare = RunSetup(2, 0, 0, "all", spare_train=True)
    assert "roles.design=offload_validation" in bound_by(late, spare)
    assert "roles.design=offload_data" in bound_by([rank(compute=5, wait=5)], spare)
    full = RunSetup(2, 0, 0, "all", free_cores=False)
    assert "roles" not in bound_by([rank(compute=5, wait=5)], full)
    assert "add a loader (roles.loaders=1)" in bound_by([rank(compute=5, wait=5)], RunSetup(1, 0, 0, "all"))


def test_seconds_are_booked_once() -> None:
    clock = StepTime()
    clock.add({"halo": 1.0, "reduce": 0.5, "spill": 0.25, "input": 9.0, "wait": 2.0})
    assert clock.end_step(10.0) == rank(halo=1.0, reduce=0.5, spill=0.25, wait=2.0, compute=6.25)
    clock.add({"validation": 3.0})
    first = clock.end_epoch(AloneCommunicator())
    assert first == [rank(halo=1.0, reduce=0.5, spill=0.25, wait=2.0, compute=6.25, validation=3.0)]
    assert clock.end_step(4.0) == rank(compute=4.0, validation=3.0)  # of this step's record, not of this epoch
    assert clock.end_epoch(AloneCommunicator()) == [rank(compute=4.0)]
