"""The links that the messages of a plan take: between devices of a node, or between nodes.

    ranks, in blocks of two on nodes      0  1 │ 2  3          grid 1 x 4: ranks 1 and 2 exchange over the network,
                                         node A │ node B       0 and 1 within A; the slowest rank is charged

Launchers start ranks node by node; if they did not, ``rank_order`` brings those together that a plan puts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from hyfi_core.cost.machine import DeviceLink, MachineModel
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement

PeerOffset = tuple[int, int]
"""Rows and columns of ranks from one to another of the same grid."""
Crossings = tuple[bool | None, ...]
"""For each of several peers: whether its messages leave the node; None if there is no such rank in the grid."""
Messages = Sequence[tuple[int, float]]
"""(rank of the earlier stage, bytes) of all that one rank of the later stage receives from it."""


class NodeLinks:
    """Times of a plan's messages: within a node or between nodes, with ranks in blocks on nodes.

    Args:
        plan: how the ranks are used.
        machine: has the links, and the number of devices on a node.
    """

    def __init__(self, plan: ParallelPlan, machine: MachineModel) -> None:
        self._plan, self._machine, self._placement = plan, machine, Placement.of(plan)
        size, per_node = self._placement.size, machine.devices_per_node
        # Where planes begin on their nodes; most of thousands of replicas begin at the same place.
        self._begins = tuple(sorted({first % per_node for first in range(0, plan.ranks, size)}))
        replicas = range(0, plan.ranks, plan.ranks_per_replica)
        self._replica_begins = tuple(sorted({first % per_node for first in replicas}))

    def halo_s(self, stage: int, received: Mapping[PeerOffset, float]) -> tuple[tuple[float, float], ...]:
        """Return (overhead of the messages, time of the bytes), both in seconds, of a halo exchange.

        One pair for each kind of rank: ranks are alike if the messages of the same peers leave their node.

        Args:
            stage: whose ranks exchange.
            received: peer of a rank -> bytes that the rank receives from it.
        """
        # Sets: thousands of ranks are of a few kinds. A kind says of each peer whether its message leaves the node.
        kinds = self._crossings(stage, tuple(received))
        return tuple({self._messages_s(zip(leaves_node, received.values(), strict=True)) for leaves_node in kinds})

    def edge_s(self, edge: tuple[int, int], incoming: Sequence[Messages]) -> float:
        """Return the seconds until the slowest rank of a stage has received the values of another stage.

        Args:
            edge: (sending stage, receiving stage).
            incoming: what each rank of the receiving stage receives; with cells, each cell of each rank.
        """
        slowest_s, per_node = 0.0, self._machine.devices_per_node
        # ``begin``: which device of its node the first rank of a plane has; it decides which messages leave a node.
        for direction, begin in product(range(self._plan.directions), self._begins):
            for target, received in self._between(edge, direction, incoming).items():
                node = (begin + target) // per_node
                messages = (((begin + source) // per_node != node, length) for source, length in received)
                slowest_s = max(slowest_s, sum(self._messages_s(messages)))
        return slowest_s

    def _between(self, edge: tuple[int, int], direction: int, incoming: Sequence[Messages]) -> dict[int, Messages]:
        """Return receiving rank -> (sending rank, bytes) of its messages, one for each of its cells and each peer.

        Args:
            edge: (sending stage, receiving stage).
            direction: of the pipeline whose ranks are returned.
            incoming: as for ``edge_s``; senders are positions in the sending stage.
        """
        cells = self._plan.cell_grid or (1, 1)
        fine, incoming_by_rank = self._placement.by_cells(cells), dict[int, list[tuple[int, float]]]()
        sources, targets = ([cell // prod(cells) for cell in fine.group(stage, direction)] for stage in edge)
        for target, messages in zip(targets, incoming, strict=True):
            incoming_by_rank.setdefault(target, []).extend((sources[source], length) for source, length in messages)
        return dict(incoming_by_rank)

    def within_stage(self, stage: int) -> DeviceLink:
        """Return the slowest link among the ranks of a stage, in one plane."""
        groups = [self._placement.group(stage, direction) for direction in range(self._plan.directions)]
        return self._link(any(self._leaves(begin, group) for begin in self._begins for group in groups))

    def between_planes(self) -> DeviceLink:
        """Return the slowest link between ranks with the same position in all planes of a replica."""
        size = self._placement.size
        groups = [range(rank, self._plan.ranks_per_replica, size) for rank in range(size)]
        return self._link(any(self._leaves(begin, group) for begin in self._replica_begins for group in groups))

    def _leaves(self, begin: int, ranks: Iterable[int]) -> bool:
        """Whether ranks are on more than one node, if rank 0 is device ``begin`` of its node."""
        return len({(begin + rank) // self._machine.devices_per_node for rank in ranks}) > 1

    def _link(self, network: bool) -> DeviceLink:
        return self._machine.network if network else self._machine.node

    def _crossings(self, stage: int, peers: tuple[PeerOffset, ...]) -> frozenset[Crossings]:
        """Return, for each kind of rank in a stage, whether the message of each peer leaves the node.

        Args:
            stage: whose ranks exchange.
            peers: offsets from a rank to its peers.
        """
        grid, per_node = self._placement.grids[stage], self._machine.devices_per_node
        kinds: frozenset[Crossings] = frozenset()
        # Where the stage's first rank is on its node depends on the direction and on the replica.
        for direction in range(self._plan.directions):
            first = self._placement.group(stage, direction)[0]
            begins = tuple(sorted({(begin + first) % per_node for begin in self._begins}))
            kinds |= _crossings(grid, begins, per_node, direction == 1, peers)
        return kinds

    def _messages_s(self, messages: Iterable[tuple[bool | None, float]]) -> tuple[float, float]:
        """Return (overhead of the messages, time of the bytes), in seconds; both links carry bytes at the same time.

        Args:
            messages: (whether the message leaves the node, its bytes); with None there is no such message.
        """
        machine, overhead_s, wire_s = self._machine, 0.0, [0.0, 0.0]  # within the node, and over the network
        for network, length in messages:
            if network is not None:
                link = self._link(network)
                overhead_s += machine.message_s + link.latency_s
                wire_s[network] += length / link.bytes_per_s
        return overhead_s, max(wire_s)


@lru_cache(maxsize=4096)  # networks repeat their blocks, and plans their grids
def _crossings(
    grid: tuple[int, int], begins: tuple[int, ...], per_node: int, backwards: bool, peers: tuple[PeerOffset, ...]
) -> frozenset[Crossings]:
    """Return, for each kind of rank in a grid, which of its messages leave the node: alike ranks are one kind.

    For each peer there is True, False, or None if the grid has no rank at this offset.

    Args:
        grid: rows and columns of ranks.
        begins: indices that the device of the grid's first rank may have on its node; they differ between replicas.
        per_node: devices of a node.
        backwards: whether rank numbers fall along the grid, as in the second direction.
        peers: offsets from a rank to its peers.
    """
    (rows, columns), step = grid, -1 if backwards else 1

    def node_of(begin: int, y: int, x: int) -> int:
        return (begin + step * (y * columns + x)) // per_node

    distinct: set[Crossings] = set()
    for begin, y, x in product(begins, range(rows), range(columns)):
        node, crossings = node_of(begin, y, x), list[bool | None]()
        for down, right in peers:
            inside = 0 <= y + down < rows and 0 <= x + right < columns
            crossings.append(node_of(begin, y + down, x + right) != node if inside else None)
        distinct.add(tuple(crossings))
    return frozenset(distinct)
