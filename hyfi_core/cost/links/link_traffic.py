"""Bytes that the ranks of a plan send to each other in one step, and how many of them leave a node.

    grids ((1, 2), (1, 1))     rank 0 ◀─ halos ─▶ rank 1         pairs (0, 1), (0, 2), (1, 2)
                                  └── values ──▶ rank 2 ◀──┘     gradients: over {0, 1}, over {2}

Halos are those of the rank in the middle of each grid: every other rank receives the same from ranks in the same
directions. Not counted are sums over a map, a few bytes for each channel.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from hyfi_core.capture.program import Program
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.operators import value_bytes
from hyfi_core.cost.step.lowered_stages import LoweredPlans, LoweredStages, lowered_stages
from hyfi_core.ops.plane_exchange import PlaneExchange
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.plan.transfer import Transfer
from hyfi_core.rules.instructions import CollectiveCall, RankProgram

_Pairs = dict[tuple[int, int], float]


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that ranks send to each other in a step.

    Attributes:
        plan: the plan of the step.
        pairs: two ranks of a replica, the lower first -> bytes between them, both ways together.
        reduced: ranks of a replica -> bytes of the gradients that these ranks reduce, with the same ranks of all other
            replicas.
    """

    plan: ParallelPlan
    pairs: Mapping[tuple[int, int], float]
    reduced: Mapping[frozenset[int], float]

    def between_nodes(self, nodes: Sequence[Hashable]) -> float:
        """Return the bytes that leave a node in a step; gradients are summed within each node first.

        Args:
            nodes: the node of each rank of the plan.
        """
        firsts = range(0, self.plan.ranks, self.plan.ranks_per_replica)  # of the replicas
        total = 0.0
        for (a, b), pair_bytes in self.pairs.items():
            total += pair_bytes * sum(nodes[first + a] != nodes[first + b] for first in firsts)
        for ranks, gradient_bytes in self.reduced.items():
            distinct = len({nodes[first + rank] for first in firsts for rank in ranks})
            total += 2 * (distinct - 1) * gradient_bytes  # each of n nodes sends 2 (n - 1) / n of the gradients
        return total


def link_traffic(program: Program, plan: ParallelPlan, lowered_plans: LoweredPlans | None = None) -> LinkTraffic:
    """Return the bytes that ranks send to each other in a step of a plan.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts and without cells.
        lowered_plans: stages that were lowered before; those lowered here are added.

    Raises:
        RequestError: the plan does not work for this model.
    """
    assert plan.cells is None, "cells send nothing between ranks"
    stages = lowered_stages(
        program, plan, plan, reference_machine(), LoweredPlans() if lowered_plans is None else lowered_plans
    ).whole()
    placement = Placement.of(plan)
    pairs: _Pairs = {}
    for direction in range(plan.directions):
        # Directions divide the micro-batches.
        rounds = plan.microbatches // plan.directions
        for stage, divided in enumerate(stages.divided):
            group = placement.group(stage, direction)
            for plane, ranked in enumerate(divided.planes):
                plane_ranks = [plane * placement.size + rank for rank in group]
                _add_halos(pairs, ranked, placement.grids[stage], plane_ranks, rounds)
            _add_exchanges(pairs, divided.exchanges, group, placement.size, rounds)
        for (a, b), transfer in stages.between.items():
            for first in range(0, plan.ranks_per_replica, placement.size):  # of the planes
                sources, targets = ([first + r for r in placement.group(s, direction)] for s in (a, b))
                # Values go forward, and their cotangents come back.
                for source, back in product(range(transfer.sources), (False, True)):
                    for target, pieces in transfer.outgoing(source, back).items():
                        _add(pairs, sources[source], targets[target], rounds * sum(piece.bytes for piece in pieces))
    return LinkTraffic(plan, pairs, _reduced(program, plan, placement, stages, pairs))


def _add(pairs: _Pairs, a: int, b: int, sent_bytes: float) -> None:
    """Add the bytes that two ranks send to each other to ``pairs``; nothing if they are the same rank."""
    if a != b and sent_bytes:
        key = min(a, b), max(a, b)
        pairs[key] = pairs.get(key, 0.0) + sent_bytes


def _add_halos(pairs: _Pairs, ranked: RankProgram, grid: tuple[int, int], group: Sequence[int], rounds: int) -> None:
    """Add the bytes of all halos of a stage in a step to ``pairs``.

    Args:
        pairs: pair of ranks -> bytes.
        ranked: the stage, lowered for the rank in the middle of the grid.
        grid: rows and columns of ranks.
        group: ranks of the grid, row-major.
        rounds: micro-batches of one direction in a step.
    """
    rows, columns = grid
    # The rank in the middle has all neighbours; those at the border receive less.
    middle = rows // 2, columns // 2
    for (down, right), halo_bytes in _received(ranked, middle, columns).items():
        for y, x in product(range(rows), range(columns)):
            if 0 <= y + down < rows and 0 <= x + right < columns:
                peer = group[(y + down) * columns + x + right]
                _add(pairs, group[y * columns + x], peer, 2 * rounds * halo_bytes)  # backward returns as much


def _add_exchanges(
    pairs: _Pairs, exchanges: Sequence[PlaneExchange], group: Sequence[int], size: int, rounds: int
) -> None:
    """Add the bytes of the values that planes exchange in a step to ``pairs``.

    Args:
        pairs: pair of ranks -> bytes.
        exchanges: the exchanges of one stage.
        group: ranks of the stage in plane 0.
        size: number of ranks of a plane.
        rounds: micro-batches of one direction in a step.
    """
    for exchange in exchanges:
        for value in exchange.values:
            times = 2 if value.name in exchange.active else 1  # a cotangent comes back
            for taker, rank in product(value.takers, group):
                _add(pairs, value.owner * size + rank, taker * size + rank, rounds * times * value.nbytes)


def _received(ranked: RankProgram, middle: tuple[int, int], columns: int) -> dict[tuple[int, int], float]:
    """Return the bytes that a rank receives in a forward from each peer: `{(-1, 0): 4096}` are from the rank above.

    Args:
        ranked: the stage, lowered for the rank in the middle of the grid.
        middle: (row, column) of this rank.
        columns: number of columns of the grid.
    """
    # Three estimates of the same, by the peer's offset (rows, columns): what the middle rank receives; what it sends,
    # which another rank receives from the opposite side; and corners, from the sides of its halos.
    received: dict[tuple[int, int], float] = {}
    sent: dict[tuple[int, int], float] = {}
    corners: dict[tuple[int, int], float] = {}
    for call in ranked.instructions:
        if not isinstance(call, CollectiveCall):
            continue
        # An exchange by itself, or that of the halo of a window operator.
        operator: Any = call.operator
        transfer = getattr(getattr(operator, "halo", operator), "transfer", None)
        name = next(iter(call.inputs), None)
        if not isinstance(transfer, Transfer) or name is None:
            continue
        info = ranked.values[name]
        pixel_bytes = prod(info.shape) * info.dtype.itemsize / max(1, transfer.map.area)
        incoming, outgoing = (
            {(s.peer // columns - middle[0], s.peer % columns - middle[1]): s.box for s in strips}
            for strips in (transfer.receives, transfer.sends)
        )
        for (y, x), box in incoming.items():
            received[y, x] = received.get((y, x), 0.0) + pixel_bytes * box.area
        for (y, x), box in outgoing.items():
            sent[-y, -x] = sent.get((-y, -x), 0.0) + pixel_bytes * box.area
        for corner, above, beside in (((-1, 1), incoming, outgoing), ((1, -1), outgoing, incoming)):
            if (-1, 0) in above and (0, -1) in beside:
                corner_px = above[-1, 0].height * beside[0, -1].width
                corners[corner] = corners.get(corner, 0.0) + pixel_bytes * corner_px
    # The first that knows an offset counts: received, then sent, then corners. In a grid of two rows, the middle rank
    # has no neighbour below, but what it sends up is what the other row receives from below. In a grid of 2 × 2, it has
    # no peer at two of the four corners, so these are computed from the height and width of its halos.
    return corners | sent | received


def _reduced(
    program: Program, plan: ParallelPlan, placement: Placement, stages: LoweredStages, pairs: _Pairs
) -> dict[frozenset[int], float]:
    """Return ranks of a replica -> bytes of the gradients that they reduce, with the same ranks of other replicas.

    What mirrors send point to point is added to ``pairs``, two ranks -> bytes between them.
    """
    scale = 0.5 if plan.reduce_dtype == "bfloat16" else 1.0  # of the bytes of a weight, which is float32
    users_of: dict[str, list[int]] = {}  # parameter -> the stages that use it
    for stage, (piece, _, _) in enumerate(stages.each):
        for name in piece.program.parameters:
            users_of.setdefault(name, []).append(stage)
    directions = 1 if plan.mirror == "point_to_point" else plan.directions
    firsts = range(0, plan.ranks_per_replica, placement.size)  # of the planes
    reduced: dict[frozenset[int], float] = {}
    for name, users in users_of.items():
        weight_bytes = float(value_bytes(program, name))
        holders = {r for stage in users for d in range(directions) for r in placement.group(stage, d)}
        ranks = frozenset(first + r for r in holders for first in firsts)
        reduced[ranks] = reduced.get(ranks, 0.0) + scale * weight_bytes
        if directions < plan.directions:  # a mirror: gradients go to direction 0, new weights come back
            for stage in users:
                mirrored = zip(placement.group(stage, 0), placement.group(stage, 1), strict=True)
                for first, (owner, mirror) in product(firsts, mirrored):
                    _add(pairs, first + owner, first + mirror, 2 * weight_bytes)
    return {ranks: total_bytes for ranks, total_bytes in reduced.items() if len(ranks) * plan.replicas > 1}
