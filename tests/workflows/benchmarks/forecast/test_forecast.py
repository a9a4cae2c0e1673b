"""What the benchmark of forecasts compares, without measuring."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.step.simulator import forecast_step
from tests.harness import captured_once
from tests.hyfi_core.cost.step.test_simulator import Network
from workflows.benchmarks.forecast.__main__ import Comparison
from workflows.benchmarks.forecast.cases import NETWORKS, PLANS, label
from workflows.benchmarks.forecast.sleeping import PLANS as SLEEPING
from workflows.benchmarks.forecast.sleeping import besides_sleeping_s, measured_step_s, predicted_step_s


def test_the_plans_are_of_three_networks_and_use_what_plans_can() -> None:
    plans = [plan for name in NETWORKS for plan in PLANS[name]]
    assert len(NETWORKS) == 3 and len(plans) >= 16 and {plan.ranks for plan in plans} == {1, 2, 4}
    assert any(plan.cells for plan in plans) and any(plan.recompute for plan in plans)
    assert any(plan.branches > 1 for plan in plans) and any(plan.replicas > 1 for plan in plans)
    assert {plan.schedule for plan in plans} >= {"1f1b", "gpipe", "chimera", "gems_master", "sequential"}
    assert label(plans[0]) == "grids [[1, 1]]"


def test_errors_are_relative_to_what_was_measured() -> None:
    program = captured_once(Network().train(), (1, 3, 64, 64), torch.float32)
    plan = next(plan for plan in PLANS["resnet18"] if plan.ranks == 1)
    found = replace(
        forecast_step(program, plan, reference_machine()), step_s=1.0, resident_bytes=(90, 60), memory_bytes=(60, 66)
    )
    case = Comparison("resnet18", found, 0.8, 100, 60, False)
    assert case.step_error == pytest.approx(0.25) and case.memory_error == pytest.approx(0.1)
    assert case.tensors_error == pytest.approx(0.1) and '"tensors_ratio": 1.1' in case.to_json()
    assert '"ratio": 1.25' in case.to_json() and '"memory_ratio": 0.9' in case.to_json()


def test_ranks_that_sleep_take_as_long_as_was_simulated() -> None:
    assert all(plan.ranks == 8 for plan in SLEEPING)
    plan = SLEEPING[-1]
    predicted_s = predicted_step_s(plan, block_s=0.005)
    assert predicted_s <= measured_step_s(plan, 1, block_s=0.005) < predicted_s + 3.0


def test_what_blocks_take_besides_sleeping_counts_for_the_grid_on_which_it_was_measured() -> None:
    plan = next(plan for plan in SLEEPING if plan.grids[0] == (2, 2))
    alone_s, taken = predicted_step_s(plan), besides_sleeping_s((1, 2), 1)
    assert predicted_step_s(plan, besides={(1, 2): taken}) == alone_s and all(0 <= seconds < 1 for seconds in taken)
    longer_s = predicted_step_s(plan, besides={(2, 2): (0.001, 0.002)}) - alone_s
    assert 8 * 0.003 < longer_s <= 8 * 8 * 0.003  # eight blocks and micro-batches, some of them within the bubble
