from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.program import Program
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machine import DeviceLink, SharedCores, UpdateCost
from hyfi_core.cost.machines.machine_file import load_machine, reference_machine
from hyfi_core.cost.operators import operator_costs
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.cost.step import simulator
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.simulator import StepForecast, forecast_step
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once, run_copies
from tests.test_branches import SmallInception

PX = 64


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2))
        self.head = nn.Linear(32, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.second(self.first(images)).mean((2, 3)))
        return answer


@cache
def program(images: int = 1) -> Program:
    torch.manual_seed(0)
    return captured_once(Network().train(), (images, 3, PX, PX), torch.float32)


def forecast(machine: str = "cpu", **plan: Any) -> StepForecast:
    return forecast_step(program(), ParallelPlan(**plan), load_machine(machine))


def traffic(plan: ParallelPlan, batch: int) -> list[dict[str, dict[str, int]]]:
    def body(comm: Communicator, model: nn.Module) -> dict[str, dict[str, int]]:
        engine = hyfi_core.parallelize(model, (batch, 3, PX, PX), plan, comm)
        engine.accumulate(torch.ones(batch, 3, PX, PX), torch.zeros(batch, dtype=torch.long))
        return engine.traffic()

    return run_copies(Network().train(), plan.ranks, body)


def test_one_rank_takes_the_time_of_its_operators() -> None:
    found, machine = forecast(grids=((1, 1),)), reference_machine()
    costs = operator_costs(program(), machine)
    wanted = sum(cost.forward_s(machine, 1.0, False) + cost.backward_s(machine, 1.0, False) for cost in costs)
    weights = sum(p.numel() * 4 for p in Network().parameters())
    assert found.step_s == pytest.approx(wanted + 7 * weights / machine.memory_bytes_per_s)
    assert set(found.exposed_s.values()) == {0.0} and found.bubble == pytest.approx(0.0)
    assert found.bound_by == "compute" and found.compute_s == (pytest.approx(wanted),)


def test_the_first_operator_has_no_gradient_of_the_image() -> None:
    costs = {cost.kind: cost.gradients for cost in operator_costs(program())}
    assert costs["thin_convolution"] == 1 and costs["convolution"] == 2 and costs["product"] == 2


@pytest.mark.parametrize("cuts", [("first",), ("first", "second.0"), ("second",)])
def test_stages_together_compute_what_one_stage_does(cuts: tuple[str, ...]) -> None:
    machine = replace(reference_machine(), devices_per_node=1)  # nobody takes anything from another one
    (whole,) = StageCosts(program(), ParallelPlan(grids=((1, 1),)), machine).stages
    stages = StageCosts(program(), ParallelPlan(grids=((1, 1),) * (len(cuts) + 1), cuts=cuts), machine).stages
    assert sum(stage.forward_s for stage in stages) == pytest.approx(whole.forward_s, rel=1e-6)
    assert sum(stage.backward_s for stage in stages) == pytest.approx(whole.backward_s, rel=1e-6)


def test_halos_are_those_that_are_sent() -> None:
    plan = ParallelPlan(grids=((1, 2),), fused_halo=1)
    (stage,) = StageCosts(program(), plan, reference_machine()).stages
    assert [found["halo"]["bytes"] for found in traffic(plan, 1)] == [2 * stage.halo_bytes] * 2


def test_a_mean_over_the_map_sums_one_number_for_each_channel() -> None:
    at_once = DeviceLink(latency_s=0.0, bytes_per_s=1e9)
    machine = replace(reference_machine(), kernel_s=0.0, node=at_once, network=at_once)
    (stage,) = StageCosts(program(), ParallelPlan(grids=((1, 2),), fused_halo=1), machine).stages
    norm_bytes, mean_bytes = 3 * 8 * 16, 4 * 32  # count, mean and variance of the norm's channels; the last map's means
    assert stage.sums_s == pytest.approx(2 * (norm_bytes + mean_bytes) / 1e9)  # forward and backward


def test_values_between_stages_are_those_that_are_sent() -> None:
    plan = ParallelPlan(grids=((1, 2), (1, 1)), cuts=("first",), microbatches=2)
    costs = StageCosts(program(), plan, reference_machine())
    assert set(costs.edges) == {(0, 1)}
    first, second, last = (found["stage"]["bytes"] for found in traffic(plan, 2))
    assert first + second == last == 2 * 16 * PX * PX * 4


def test_a_stage_with_more_ranks_computes_less_and_waits_for_halos() -> None:
    one, four = forecast(grids=((1, 1),)), forecast(grids=((2, 2),), fused_halo=1)
    kernels_s = 3 * len(program().operators) * reference_machine().kernel_s
    assert one.compute_s[0] / 4 < four.compute_s[0] < one.compute_s[0] / 4 + kernels_s
    assert four.exposed_s["halo"] > 0 and four.exposed_s["sums"] > 0 and four.exposed_s["reduce"] > 0


def test_one_rank_stands_for_all_that_do_the_same() -> None:
    plan: dict[str, Any] = {"grids": ((1, 2), (1, 2)), "cuts": ("first",), "microbatches": 4}
    for schedule in ("1f1b", "gpipe", "chimera"):
        small = forecast(**plan, schedule=schedule)
        with mock.patch.object(simulator, "_collapsed", lambda plan: plan):
            whole = forecast(**plan, schedule=schedule)
        assert len(small.simulation.busy_s) == 2 and len(whole.simulation.busy_s) == 4
        assert small.step_s == pytest.approx(whole.step_s) and small.bubble == pytest.approx(whole.bubble)


def test_plans_with_the_same_stages_are_lowered_once_and_forecast_the_same() -> None:
    known, machine = LoweredPlans(), load_machine("a100")
    for index, more in enumerate(
        ({}, {"recompute": True}, {"schedule": "chimera"}, {"replicas": 4}, {"cells": (2, 1)})
    ):
        plan = ParallelPlan(grids=((1, 2), (1, 2)), cuts=("first",), microbatches=2, **more)  # type: ignore[arg-type]
        assert forecast_step(program(), plan, machine, lowered_plans=known) == forecast_step(program(), plan, machine)
        assert len(known._plans) == (2 if index == 4 else 1)  # cells are other parts


def test_directions_that_share_ranks_in_part_are_simulated_whole() -> None:
    found = forecast(grids=((1, 2), (1, 1)), cuts=("first",), microbatches=2, schedule="gems_master")
    assert len(found.simulation.busy_s) == 3


def test_thousands_of_ranks_take_no_longer_to_simulate() -> None:
    grids = ((1, 3), (1, 1))  # a replica fills a node, so all have the same links
    begin = time.process_time()
    found = forecast("v100-lassen", grids=grids, cuts=("first",), replicas=640, microbatches=4)
    assert time.process_time() - begin < 30
    alone = forecast("v100-lassen", grids=grids, cuts=("first",), microbatches=4)
    assert found.plan.ranks == 2560
    assert found.step_s - alone.step_s == pytest.approx(found.exposed_s["reduce"] - alone.exposed_s["reduce"])


def test_recomputation_costs_a_forward_that_knows_the_statistics_of_its_norms_and_saves_memory() -> None:
    plan: dict[str, Any] = {"grids": ((1, 1), (1, 1)), "cuts": ("first",), "microbatches": 2}
    program_, machine = program(), reference_machine()
    kept = StageCosts(program_, ParallelPlan(**plan), machine).stages
    again = StageCosts(program_, ParallelPlan(**plan, recompute=True), machine).stages
    (norm,) = (cost for cost in operator_costs(program_, machine) if cost.kind == "norm")
    known_s = norm.forward_s(machine, 1.0, False) - norm.forward_s(machine, 1.0, False, "elementwise")
    assert known_s > 0.05 * kept[0].forward_s
    assert again[0].backward_s - kept[0].backward_s == pytest.approx(kept[0].forward_s - known_s)
    assert again[1].backward_s == kept[1].backward_s  # of the last stage, each backward follows its forward at once
    assert forecast(**plan, recompute=True).memory_bytes[0] < forecast(**plan).memory_bytes[0]


def test_interleaved_stages_are_forecast_and_pieces_save_memory() -> None:
    pipeline = forecast(grids=((1, 1), (1, 1)), interleave=2, microbatches=2, cuts=("first", "second.0", "second.2"))
    assert len(pipeline.compute_s) == 4 and pipeline.step_s > 0
    kept, pieces = (
        forecast(grids=((1, 1),), interleave=3, cuts=("first", "second.0"), recompute=recompute)
        for recompute in (False, True)
    )
    assert pieces.memory_bytes[0] < kept.memory_bytes[0] and kept.step_s < pieces.step_s < 1.5 * kept.step_s


def test_cells_that_spill_nothing_need_as_much_memory_and_a_little_more_time() -> None:
    one, cells = forecast(grids=((1, 1),)), forecast(grids=((1, 1),), cells=(2, 2))
    assert one.step_s < cells.step_s < 3 * one.step_s
    assert cells.memory_bytes == one.memory_bytes


def test_gradients_are_reduced_while_the_backward_goes_on() -> None:
    plan, weights = ParallelPlan(grids=((1, 1),), replicas=2), sum(p.numel() * 4 for p in Network().parameters())
    machine = load_machine("v100-lassen")
    with mock.patch("hyfi_core.cost.links.reduction.BUCKET_BYTES", 1):
        (overlapped,) = StageCosts(program(), plan, machine).stages
    (at_once,) = StageCosts(program(), plan, machine).stages
    assert 0 < overlapped.reduce_s < at_once.reduce_s
    assert at_once.reduce_s == pytest.approx(machine.all_reduce_s(2, weights))


def test_cores_that_compute_reduce_gradients_afterwards() -> None:
    plan, weights = ParallelPlan(grids=((1, 1),), replicas=2), sum(p.numel() * 4 for p in Network().parameters())
    (stage,) = StageCosts(program(), plan, reference_machine()).stages
    assert stage.reduce_s == pytest.approx(reference_machine().all_reduce_s(2, weights))


def test_measured_overheads_of_weights_forks_and_updates_are_part_of_a_step() -> None:
    plan = ParallelPlan(grids=((1, 1),))
    kinds = {kind: (reference_machine().kernel_s,) * 2 for kind in ("convolution", "elementwise")}
    measured = replace(reference_machine(), overhead_s=kinds)  # the same, but forks count
    plain_s = forecast_step(program(), plan, reference_machine()).step_s
    assert forecast_step(program(), plan, measured).step_s == pytest.approx(plain_s)  # this network has no forks
    weights = 4 * (32 * 16 * 9 + 32 * 32 * 25)
    rates = {"convolution": (1e9, 5e8)}
    slower = forecast_step(program(), plan, replace(reference_machine(), weight_bytes_per_s=rates)).step_s
    assert slower - plain_s == pytest.approx(3 * weights / 1e9, rel=0.02)
    updated = forecast_step(program(), plan, replace(reference_machine(), update=UpdateCost(1.0, 1e30))).step_s
    assert updated == pytest.approx(len(list(Network().parameters())), rel=0.01)


def test_every_rank_watches_the_weights_of_all_stages() -> None:
    """In contrast to the update, of which each rank does its own stage's."""
    count, machine = len(list(Network().parameters())), replace(reference_machine(), update=UpdateCost(1e-9, 1e30))
    watching = replace(machine, update=UpdateCost(1e-9, 1e30, watch_s=1.0))
    for grids in (((1, 1),), ((1, 1), (1, 1))):
        plan = with_cuts(ParallelPlan(grids=grids), program(), machine)
        more_s = forecast_step(program(), plan, watching).step_s - forecast_step(program(), plan, machine).step_s
        assert more_s == pytest.approx(count)


def test_messages_between_stages_take_a_core_where_cores_are_shared() -> None:
    plan = with_cuts(ParallelPlan(grids=((1, 1), (1, 1)), microbatches=4), program(), reference_machine())
    slow = replace(reference_machine(), node=DeviceLink(1.0, 1e12), devices_per_node=2)
    own, shared = SharedCores(2, 1e-9, 1e-9), SharedCores(1, 1e-9, 1e-9)
    overlapped_s = forecast_step(program(), plan, replace(slow, cores=own)).step_s
    assert overlapped_s < 6  # messages of one micro-batch are on their way while others are
    both_ends = 2 * 2 * 4  # of the values and cotangents of four micro-batches
    assert forecast_step(program(), plan, replace(slow, cores=shared)).step_s == pytest.approx(both_ends, rel=0.1)


def test_a_value_that_two_operators_use_has_its_cotangents_added() -> None:
    forked = captured_once(SmallInception().train(), (1, 3, PX, PX), torch.float32)
    assert sum(cost.forks for cost in operator_costs(forked)) > 0
    machine = replace(reference_machine(), overhead_s={"pool": (1e-9, 1e-9)})
    fork = next(cost for cost in operator_costs(forked) if cost.forks)
    added_s = machine.kernel_s + 3 * fork.output_bytes / machine.memory_bytes_per_s
    alone = replace(fork, forks=0)
    longer_s = fork.backward_s(machine, 1.0, False) - alone.backward_s(machine, 1.0, False)
    assert longer_s == pytest.approx(fork.forks * added_s)


def test_a_received_cotangent_is_added_to_others() -> None:
    """That of a value which two later stages use comes back twice."""

    class Skipping(Network):
        def __init__(self, skips: bool) -> None:
            super().__init__()
            self.skips, self.first = skips, nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32))
            self.second = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            maps = self.first(images)
            answer: torch.Tensor = self.head((self.second(maps) + (maps if self.skips else 1)).mean((2, 3)))
            return answer

    machine = replace(reference_machine(), overhead_s={"pool": (1e-9, 1e-9)})
    plan = ParallelPlan(grids=((1, 1),) * 3, cuts=("first", "second"))
    skipping, plain = (
        StageCosts(captured_once(Skipping(skips).train(), (1, 3, PX, PX), torch.float32), plan, machine).stages[0]
        for skips in (True, False)
    )
    added_s = machine.kernel_s + 3 * (32 * PX * PX * 4) / machine.memory_bytes_per_s
    assert skipping.backward_s - plain.backward_s == pytest.approx(added_s, rel=1e-3)  # beside the statistics


def test_backwards_in_two_parts_wait_less_and_compute_the_same() -> None:
    plan: dict[str, Any] = {"grids": ((1, 1), (1, 1)), "cuts": ("first",), "microbatches": 4}
    whole, parts = forecast(**plan), forecast(**plan, schedule="zb_h1")
    assert parts.compute_s == whole.compute_s and parts.busy > whole.busy
    assert parts.step_s < whole.step_s and parts.bubble < whole.bubble
    costs = StageCosts(program(), ParallelPlan(**plan, schedule="zb_h1"), reference_machine()).stages
    assert all(0 < stage.weight_s < stage.backward_s for stage in costs)
    last = parts.simulation.schedule.actions[1][-2]
    (wait,) = (e for e in parts.events() if e.name == str(last))
    assert last.verb == "W" and wait.end_s - wait.start_s == pytest.approx(costs[1].weight_s)


def test_a_grid_that_leaves_its_node_waits_longer() -> None:
    slow = replace(reference_machine(), network=DeviceLink(1e-3, 1e6))
    near, far = (replace(slow, devices_per_node=n) for n in (4, 2))
    plan = ParallelPlan(grids=((2, 2),), fused_halo=1)
    waits = [forecast_step(program(), plan, machine).exposed_s for machine in (near, far)]
    assert waits[0]["halo"] < waits[1]["halo"] and waits[0]["reduce"] < waits[1]["reduce"]


def test_branches_take_the_time_of_the_fullest_plane_and_of_the_exchange() -> None:
    program = captured_once(SmallInception().train(), (1, 3, 128, 128), torch.float32)
    alone = replace(reference_machine(), devices_per_node=1)  # nobody takes anything from another one
    (one,) = StageCosts(program, ParallelPlan(((1, 1),)), alone).stages
    (two,) = StageCosts(program, ParallelPlan(((1, 1),), branches=2), alone).stages
    assert one.branch_s == 0.0 and two.branch_s > 0.0
    computed = [stage.forward_s + stage.backward_s - stage.branch_s for stage in (one, two)]
    assert computed[0] / 2 < computed[1] < 0.75 * computed[0]
    found = forecast_step(program, ParallelPlan(((1, 1),), branches=2, replicas=2), reference_machine())
    assert found.exposed_s["branches"] > 0 and len(found.memory_bytes) == 2
    with pytest.raises(RequestError, match="no parallel branches"):
        forecast(grids=((1, 1),), branches=2)
