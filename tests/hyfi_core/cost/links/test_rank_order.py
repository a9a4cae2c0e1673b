"""Bytes between ranks are those that a run sends, and no order of ranks sends more of them out of a node."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Message, Pending
from hyfi_core.cost.links.link_traffic import LinkTraffic, link_traffic
from hyfi_core.cost.links.rank_order import in_blocks, rank_order
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import run_copies
from tests.hyfi_core.cost.search.test_planner import PX, Narrowing, programs
from tests.test_branches import SmallInception


class PeerBytes(ForwardingCommunicator):
    """Counts the bytes sent between two ranks of the world, in any group."""

    def __init__(self, comm: Communicator, world: Sequence[int], sent: Counter[tuple[int, int]]) -> None:
        super().__init__(comm)
        self._world, self._sent = world, sent

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        own = self._world[self.rank]
        for message in sends:
            peer = self._world[message.peer]
            self._sent[min(own, peer), max(own, peer)] += message.tensor.numel() * message.tensor.element_size()
        return self._comm.exchange(sends, receives)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        return self._counting(self._comm.split(color, key))

    def subgroup(self, members: Sequence[int]) -> Communicator | None:
        return self._counting(self._comm.subgroup(members))

    def _counting(self, group: Communicator | None) -> Communicator | None:
        if group is None:
            return None
        world = group.broadcast_object(group.gather_objects(self._world[self.rank]))
        return PeerBytes(group, world, self._sent)  # type: ignore[return-value]


def sent(plan: ParallelPlan, batch: int, model: nn.Module | None = None) -> Counter[tuple[int, int]]:
    def body(comm: Communicator, model: nn.Module) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        counted: Any = PeerBytes(comm, range(comm.size), found)
        engine = hyfi_core.parallelize(model, (batch, 3, PX, PX), plan, counted)
        found.clear()
        engine.accumulate(torch.ones(batch, 3, PX, PX), torch.zeros(batch, dtype=torch.long))
        return found

    return sum(run_copies((model or Narrowing()).train(), plan.ranks, body), Counter())


def traffic(batch: int, **fields: Any) -> LinkTraffic:
    plan = ParallelPlan(**fields)
    program = programs(batch // plan.microbatches)
    return link_traffic(program, with_cuts(plan, program))


@pytest.mark.parametrize(
    ("batch", "fields"),
    [
        (1, {"grids": ((1, 4),), "fused_halo": 1}),
        (1, {"grids": ((3, 2),), "fused_halo": 3}),
        (1, {"grids": ((2, 2),), "fused_halo": 3}),
        (1, {"grids": ((2, 3),), "fused_halo": 1}),
        (2, {"grids": ((2, 2), (1, 2)), "cuts": ("two",), "microbatches": 2}),
        (2, {"grids": ((1, 2), (1, 1)), "cuts": ("two",), "microbatches": 2, "schedule": "chimera"}),
    ],
)
def test_the_bytes_between_ranks_are_those_that_are_sent(batch: int, fields: dict[str, Any]) -> None:
    found = traffic(batch, **fields)
    assert found.pairs and sent(found.plan, batch) == pytest.approx(dict(found.pairs), rel=0.01)  # and buffers


def test_the_bytes_between_planes_are_those_that_are_sent() -> None:
    """Of the network of the tests of branches, two planes of a row of two ranks, and three planes."""
    model, shape = SmallInception().train(), (1, 3, PX, PX)
    program = capture(model, shape, torch.float32)
    for fields in ({"grids": ((1, 2),), "branches": 2, "fused_halo": 1}, {"grids": ((1, 1),), "branches": 3}):
        found = link_traffic(program, ParallelPlan(**fields))  # type: ignore[arg-type]
        assert sent(found.plan, 1, model) == pytest.approx(dict(found.pairs), rel=0.01)
        assert rank_order(found, "ABCDAB"[: found.plan.ranks]) is not None


def test_gradients_leave_a_node_once_for_each_node() -> None:
    found = traffic(2, grids=((1, 1), (1, 1)), cuts=("two",), replicas=2)
    weights = [8 * 27 + 8 + 16 * 72 + 16 + 32, 64 * 144 + 64 + 64 * 576 + 64 + 2 * 64 + 2]
    assert dict(found.reduced) == {frozenset({0}): 4 * weights[0], frozenset({1}): 4 * weights[1]}
    together, apart = found.between_nodes("AABB"), found.between_nodes("ABAB")
    assert together == 2 * 4 * sum(weights)  # each stage's gradients go to the other node and back
    assert apart == 2 * found.pairs[0, 1]  # values between the stages of both replicas


def test_ranks_in_blocks_stay_where_they_are() -> None:
    found = traffic(2, grids=((2, 2),), replicas=2)
    assert rank_order(found, "AAAABBBB") == rank_order(found, "AAAAAABB") == tuple(range(8))
    assert in_blocks("AABBBC") and in_blocks("A") and not in_blocks("ABA")


def test_a_scattered_grid_comes_together() -> None:
    row = traffic(1, grids=((1, 4),), fused_halo=1)
    order = rank_order(row, "ABAB")
    assert order == (0, 2, 1, 3)
    gradients = 2 * sum(row.reduced.values())
    halos = [row.between_nodes(nodes) - gradients for nodes in ("ABAB", "AABB")]
    assert halos[0] == pytest.approx(3 * halos[1])  # of three borders one is left
    assert rank_order(traffic(2, grids=((1, 2),), replicas=2, fused_halo=1), "ABAB") == (0, 2, 1, 3)


def test_a_large_grid_is_divided_into_tiles() -> None:
    square, nodes = traffic(1, grids=((4, 4),), fused_halo=1), [rank % 4 for rank in range(16)]
    order = rank_order(square, nodes)
    tiles = [[nodes[rank] for rank in order[row * 4 : row * 4 + 4]] for row in range(4)]
    assert tiles == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


def test_no_order_sends_more_out_of_a_node() -> None:
    found = [
        traffic(2, grids=((1, 2),), replicas=4, fused_halo=1),
        traffic(2, grids=((2, 2), (1, 1), (1, 1), (1, 1), (1, 1)), cuts=("one", "two", "three", "four")),
        traffic(2, grids=((2, 2),) * 2, cuts=("two",), microbatches=2, schedule="gems_master"),
        traffic(2, grids=((1, 1),) * 2, cuts=("two",), replicas=4, microbatches=2, schedule="chimera"),
    ]
    rng, gains = random.Random(0), 0
    for number in range(200):
        one = found[number % len(found)]
        nodes = [rng.choice("ABCD"[: rng.randint(2, 4)]) for _ in range(one.plan.ranks)]
        order = rank_order(one, nodes)
        before, after = one.between_nodes(nodes), one.between_nodes([nodes[rank] for rank in order])
        assert sorted(order) == list(range(one.plan.ranks)) and after <= before
        gains += after < before
    assert gains > 100
