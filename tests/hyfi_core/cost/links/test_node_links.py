"""A message takes the link on which it travels: that of the node, or between nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hyfi_core.cost.links.node_links import NodeLinks, PeerOffset
from hyfi_core.cost.machine import DeviceLink, MachineModel
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.step.simulator import forecast_step
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from tests.hyfi_core.cost.step.test_simulator import PX, program

SLOW, FAST = 1.0, 1e-3


def machine(per_node: int) -> MachineModel:
    """Messages take a second between nodes and a thousandth of it within; bytes likewise."""
    return replace(
        reference_machine(),
        devices_per_node=per_node,
        message_s=0.0,
        node=DeviceLink(FAST, 1 / FAST),
        network=DeviceLink(SLOW, 1 / SLOW),
    )


def test_a_halo_takes_the_link_between_its_two_ranks() -> None:
    """Of a row of four ranks on two nodes, the inner ones have one neighbour in their node and one outside."""
    links = NodeLinks(ParallelPlan(grids=((1, 4),)), machine(2))
    left, right = (0, -1), (0, 1)
    kinds = links.halo_s(0, {left: 1.0, right: 1.0})
    assert max(kinds) == (pytest.approx(SLOW + FAST), SLOW)  # bytes on both links at a time
    assert min(kinds) == (FAST, FAST)  # the outer ranks
    together = NodeLinks(ParallelPlan(grids=((1, 4),)), machine(4)).halo_s(0, {left: 1.0, right: 1.0})
    assert max(together) == (pytest.approx(2 * FAST), pytest.approx(2 * FAST))


def test_rows_on_one_node_each_send_down_and_not_along() -> None:
    links = NodeLinks(ParallelPlan(grids=((2, 2),)), machine(2))
    along, down = ({(0, 1): 1.0, (0, -1): 1.0}, {(1, 0): 1.0, (-1, 0): 1.0})
    assert max(links.halo_s(0, along)) == (FAST, FAST) and max(links.halo_s(0, down)) == (SLOW, SLOW)


def test_replicas_of_three_ranks_do_not_fit_nodes_of_two() -> None:
    one, many = (NodeLinks(ParallelPlan(((1, 2), (1, 1)), ("a",), replicas=n), machine(2)) for n in (1, 2))
    halo, value = {(0, 1): 1.0, (0, -1): 1.0}, [[(0, 1.0), (1, 1.0)]]
    assert max(one.halo_s(0, halo)) == (FAST, FAST) and max(many.halo_s(0, halo)) == (SLOW, SLOW)
    assert one.within_stage(0) == one._machine.node and many.within_stage(0) == many._machine.network
    assert one.edge_s((0, 1), value) == pytest.approx(4 * SLOW)  # two messages of a byte, from another node
    assert NodeLinks(ParallelPlan(((1, 2), (1, 1)), ("a",)), machine(3)).edge_s((0, 1), value) == pytest.approx(
        4 * FAST
    )


def test_stages_on_the_same_node_use_its_link_however_large_the_replica() -> None:
    plan = ParallelPlan(((1, 1),) * 4, ("a", "b", "c"))
    links = NodeLinks(plan, machine(2))
    within, across = (links.edge_s(edge, [[(0, 1.0)]]) for edge in ((0, 1), (1, 2)))
    assert within == pytest.approx(2 * FAST) and across == pytest.approx(2 * SLOW)


def test_planes_on_other_nodes_exchange_over_the_network() -> None:
    plan = ParallelPlan(((1, 2),), branches=2)
    near, far = (NodeLinks(plan, machine(n)) for n in (4, 2))
    assert near.between_planes() == near._machine.node and far.between_planes() == far._machine.network
    assert far.within_stage(0) == far._machine.node


PLANS: list[dict[str, Any]] = [
    {"grids": ((2, 3),), "replicas": 5},
    {"grids": ((1, 4), (1, 2), (1, 1)), "cuts": ("a", "b"), "replicas": 3},
    {"grids": ((2, 2), (1, 2)), "cuts": ("a",), "microbatches": 2, "schedule": "chimera", "replicas": 2},
    {"grids": ((3, 1),), "branches": 2, "replicas": 3},
]


@pytest.mark.parametrize(("fields", "per_node"), list(product(PLANS, (1, 2, 3, 4, 8))))
def test_the_slowest_rank_is_that_of_all(fields: dict[str, Any], per_node: int) -> None:
    """What is known of a few kinds of ranks is what looking at every rank of every replica gives."""
    plan = ParallelPlan(**fields)
    links, placement = NodeLinks(plan, machine(per_node)), Placement.of(plan)
    ways: dict[PeerOffset, float] = {(0, 1): 3.0, (0, -1): 1.0, (1, 0): 2.0, (-1, 0): 5.0, (1, 1): 1.0, (0, 2): 1.0}
    for stage, (rows, columns) in enumerate(placement.grids):
        wanted = set()
        firsts = range(0, plan.ranks, placement.size)
        for first, direction, y, x in product(firsts, range(plan.directions), range(rows), range(columns)):
            group = placement.group(stage, direction)
            own = (first + group[y * columns + x]) // per_node
            messages, wire = 0.0, {True: 0.0, False: 0.0}
            for (down, right), length in ways.items():
                if 0 <= y + down < rows and 0 <= x + right < columns:
                    away = (first + group[(y + down) * columns + x + right]) // per_node != own
                    messages += SLOW if away else FAST
                    wire[away] += length * (SLOW if away else FAST)
            wanted.add((round(messages, 9), round(max(wire.values()), 9)))
        found = {(round(a, 9), round(b, 9)) for a, b in links.halo_s(stage, ways)}
        assert found == wanted


def test_a_grid_in_its_nodes_waits_less_than_one_across_them() -> None:
    """The same plan of two replicas: nodes of two hold a grid each, nodes of three cut the second in two."""
    plan = ParallelPlan(grids=((1, 2),), replicas=2, fused_halo=1)
    slow = replace(reference_machine(), network=DeviceLink(1e-3, 1e6), crowding=type(reference_machine().crowding)())
    inside, across = (StageCosts(program(), plan, replace(slow, devices_per_node=n)).stages[0] for n in (2, 3))
    assert inside.halo_s < across.halo_s and inside.sums_s < across.sums_s
    whole = StageCosts(program(), plan, replace(slow, devices_per_node=4)).stages[0]
    assert inside.halo_s == pytest.approx(whole.halo_s) and inside.sums_s == pytest.approx(whole.sums_s)


def test_values_between_stages_stay_in_the_node_that_holds_both() -> None:
    """Replicas of two stages in nodes of two: halves of a node, with 128 replicas or one."""
    slow = replace(reference_machine(), network=DeviceLink(1e-3, 1e6), devices_per_node=2)
    plan = ParallelPlan(grids=((1, 1), (1, 1)), cuts=("first",), microbatches=2)
    few, many = (StageCosts(program(), replace(plan, replicas=n), slow).edges for n in (1, 128))
    assert few == many and set(few) == {(0, 1)}
    near, apart = (forecast_step(program(), plan, replace(slow, devices_per_node=n)) for n in (2, 1))
    assert apart.exposed_s["stage"] > 10 * near.exposed_s["stage"] > 0


def test_a_rank_waits_for_the_values_of_all_its_cells() -> None:
    plan = ParallelPlan(grids=((1, 1), (1, 1)), cuts=("first",))
    whole, cells = (StageCosts(program(), one, reference_machine()) for one in (plan, replace(plan, cells=(2, 2))))
    sent_s = 16 * PX * PX * 4 / reference_machine().node.bytes_per_s
    assert cells.edges[0, 1] >= whole.edges[0, 1] > sent_s
