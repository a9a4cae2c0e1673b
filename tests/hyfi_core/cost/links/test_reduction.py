from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hyfi_core.cost.links.reduction import GradientHolders
from hyfi_core.cost.machine import DeviceLink, MachineModel
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.plan.parallel_plan import BUCKET_BYTES, ParallelPlan

LENGTH = float(BUCKET_BYTES)


def machine(**more: Any) -> MachineModel:
    """Nodes of four devices: 1 GB/s between nodes for each, 4 GB/s for one alone, 10 GB/s inside; no latencies."""
    fields = {"rail_bytes_per_s": 4e9, "devices_per_node": 4, "kernel_s": 1e-12} | more
    links = {"node": DeviceLink(1e-12, 1e10), "network": DeviceLink(1e-12, 1e9)}
    return replace(load_machine("v100-lassen"), **links, **fields)


@pytest.mark.parametrize(
    ("fields", "stage", "group"),
    [
        ({"grids": ((1, 1),), "replicas": 8}, 0, (2, 4)),
        ({"grids": ((1, 1),) * 4, "replicas": 3}, 2, (3, 1)),  # one rank of a stage on each node
        ({"grids": ((2, 2), (2, 2))}, 1, (1, 4)),
        ({"grids": ((2, 2), (2, 2)), "schedule": "chimera", "microbatches": 2}, 0, (2, 4)),
        ({"grids": ((1, 1),) * 2, "schedule": "chimera", "microbatches": 2}, 0, (1, 2)),
        ({"grids": ((1, 1),) * 2, "schedule": "chimera", "microbatches": 2, "mirror": "point_to_point"}, 0, (1, 1)),
        ({"grids": ((1, 2),), "branches": 2, "replicas": 2}, 0, (2, 4)),
    ],
)
def test_the_ranks_of_a_stage_are_on_nodes(fields: dict[str, Any], stage: int, group: tuple[int, int]) -> None:
    assert GradientHolders.of(ParallelPlan(**fields), stage, 4) == GradientHolders(*group)


def test_one_rank_of_each_node_sends_for_all() -> None:
    inside, across, back = 1.5 * LENGTH / 1e10, LENGTH / 4e9, 3 * LENGTH / 1e10
    one = GradientHolders(2, 4).exposed_s([(1.0, LENGTH)], 1.0, machine())
    assert one == pytest.approx(inside + across + back, rel=1e-3)
    shared = GradientHolders(2, 1).exposed_s([(1.0, LENGTH)], 1.0, machine())  # with those of the other stages
    assert shared == pytest.approx(LENGTH / 1e9, rel=1e-3)
    narrow = GradientHolders(2, 4).exposed_s([(1.0, LENGTH)], 1.0, machine(rail_bytes_per_s=None))
    assert narrow == pytest.approx(inside + LENGTH / 1e9 + back, rel=1e-3)
    assert GradientHolders(1, 4).exposed_s([(1.0, LENGTH)], 1.0, machine()) == pytest.approx(inside, rel=1e-3)


def test_levels_work_on_different_buckets_at_once() -> None:
    inside, across, back = 1.5 * LENGTH / 1e10, LENGTH / 4e9, 3 * LENGTH / 1e10
    group = GradientHolders(2, 4)
    found = group.exposed_s([(0.0, LENGTH)] * 10, 0.0, machine())
    assert found == pytest.approx(inside + 9 * max(inside, across, back) + across + back, rel=1e-3)
    assert group.exposed_s([(0.0, LENGTH)] * 10, 1.0, machine()) == 0.0  # all of it while the backward ran
    assert group.exposed_s([(0.0, LENGTH / 2), (1.0, LENGTH / 2)], 1.0, machine()) == pytest.approx(
        inside + across + back, rel=1e-3
    )  # a bucket begins when it is full
    assert GradientHolders(1, 1).exposed_s([(1.0, LENGTH)], 1.0, machine()) == 0.0


def test_what_cores_do_within_nodes_is_never_hidden() -> None:
    gradients, early_s = [(0.0, 10**8)], 10**6  # long before the backward ends
    gpu = replace(load_machine("cpu"), device="cuda")
    for holders in (GradientHolders(1, 2), GradientHolders(2, 2)):
        assert holders.exposed_s(gradients, early_s, gpu) == 0.0
        exposed_s = holders.exposed_s(gradients, early_s, load_machine("cpu"))
        assert exposed_s >= load_machine("cpu").all_reduce_s(2, 10**8)
    assert GradientHolders(2, 1).exposed_s(gradients, early_s, load_machine("cpu")) == 0.0
