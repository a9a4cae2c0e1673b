"""Rank placement: which rank takes which place of a plan, so that fewer bytes leave a node.

A launcher may deal ranks to nodes like cards. Places stay as the plan numbers them; ranks change theirs:

    launcher      rank  0   1   2   3
                  node  A   B   A   B

    grid 1 x 4    place  0   1   2   3      by ``rank_order``    place  0   1   2   3
                  rank   0 ║ 1 ║ 2 ║ 3                           rank   0 │ 2 ║ 1 │ 3
                  node   A   B   A   B                           node   A   A   B   B    1 halo leaves a node, not 3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from hyfi_core.cost.links.link_traffic import LinkTraffic
from hyfi_core.plan.parallel_plan import ParallelPlan


def in_blocks(nodes: Sequence[Hashable]) -> bool:
    """Whether the ranks of every node are consecutive, as launchers place them by default."""
    changes = sum(node != following for node, following in pairwise(nodes))
    return changes == len(set(nodes)) - 1


def rank_order(traffic: LinkTraffic, nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the rank for each place of a plan: `(0, 2, 1, 3)` puts rank 2 at place 1.

    Ranks in blocks keep their order. Others get the order in which the fewest bytes leave a node, of a few orders that
    keep the ranks of a node together, and their present order.

    Args:
        traffic: bytes between the places.
        nodes: the node of each rank.
    """
    plan = traffic.plan
    same = tuple(range(plan.ranks))
    if in_blocks(nodes):
        return same
    orders = {same: None} | {
        _in_places(ranks, places): None for ranks in _node_by_node(plan, nodes) for places in _places(plan, nodes)
    }
    # The present order comes first: it wins among equals.
    return min(orders, key=lambda order: traffic.between_nodes([nodes[rank] for rank in order]))


def _node_by_node(plan: ParallelPlan, nodes: Sequence[Hashable]) -> Iterator[list[int]]:
    """Yield two orders of the ranks, both node by node.

    The first takes all ranks of a node, then those of the next. The second first takes from each node the ranks that
    fill whole replicas, so that each of these is on one node, and at the end the other ranks, again node by node.
    """
    by_node: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    yield [rank for ranks in by_node.values() for rank in ranks]
    size = plan.ranks_per_replica
    filled_ranks = {node: len(ranks) // size * size for node, ranks in by_node.items()}
    filled = [rank for node, ranks in by_node.items() for rank in ranks[: filled_ranks[node]]]
    yield [*filled, *(rank for node, ranks in by_node.items() for rank in ranks[filled_ranks[node] :])]


def _places(plan: ParallelPlan, nodes: Sequence[Hashable]) -> Iterator[list[int]]:
    """Yield the places of a plan in the order in which nodes fill them: by rows, or by tiles of a grid."""
    node_ranks = max(Counter(nodes).values())
    for tile_rows in range(1, node_ranks + 1):
        # Tiles with as many ranks as a node: neighbours along both axes are on the same node.
        if node_ranks % tile_rows == 0:
            places: list[int] = []
            for _ in range(plan.replicas * plan.branches):
                for grid in plan.grids:
                    first = len(places)
                    places += [first + at for at in _tiled(grid, (tile_rows, node_ranks // tile_rows))]
            yield places


def _tiled(grid: tuple[int, int], tile: tuple[int, int]) -> list[int]:
    """Return the positions of a grid tile by tile: `[0, 1, 4, 5, 2, 3, 6, 7]` for 2 x 4 in tiles of 2 x 2.

    They stay row-major if the tiles do not divide the grid.
    """
    (rows, columns), (high, wide) = grid, tile
    positions = [(y, x) for y in range(rows) for x in range(columns)]
    if rows % high == 0 and columns % wide == 0:
        positions.sort(key=lambda at: (at[0] // high, at[1] // wide, at[0] % high, at[1] % wide))
    return [y * columns + x for y, x in positions]


def _in_places(ranks: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """Return the rank at each place, if the first of ``ranks`` takes the first of ``places``, and so on."""
    order = [0] * len(places)
    for rank, position in zip(ranks, places, strict=True):
        order[position] = rank
    return tuple(order)
