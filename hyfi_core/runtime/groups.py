"""Groups: the communicators of one rank, one for each group that it belongs to."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import KINDS, CountedCommunicator, Span
from hyfi_core.comm.pair_channels import with_pair_channels
from hyfi_core.comm.two_level import two_level
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement


class Groups:
    """All groups of a plan that include this rank. Creation is collective over ``comm``.

    Attributes:
        all: every trainer.
        replica: the ranks of this replica; used between stages.
        stages: (stage, direction) -> the ranks of a stage, in the order of its parts, for all stages of this rank.
        placement: which ranks hold which stage.
        copies: the same over all replicas if batch norms are synchronised, else ``stages``.
    """

    def __init__(self, comm: Communicator, plan: ParallelPlan, placement: Placement) -> None:
        self.placement = placement
        self._plan = plan
        self.all = CountedCommunicator(comm)
        self.index = comm.rank // plan.ranks_per_replica
        replica = _joined(comm, self.index, comm.rank)
        if placement.stages > 1 or placement.directions > 1:
            replica = with_pair_channels(replica)
        self.replica = CountedCommunicator(replica)
        self.stages: dict[tuple[int, int], CountedCommunicator] = {}
        self.copies: dict[tuple[int, int], CountedCommunicator] = {}
        self._reductions: dict[frozenset[int], CountedCommunicator] = {}
        self._nodes: list[str] = comm.broadcast_object(comm.gather_objects(node_name()))
        grids = len(plan.grids)
        for direction in range(plan.directions):
            grid = next(g for g in range(grids) if self.replica.rank in placement.group(g, direction))
            position = placement.group(grid, direction).index(self.replica.rank)
            group = CountedCommunicator(_joined(comm, self.index * grids + grid, position))
            copies = CountedCommunicator(_joined(comm, grid, comm.rank)) if plan.sync_batch_norm else group
            for stage in range(grid, placement.stages, grids):
                self.stages[stage, direction] = group
                self.copies[stage, direction] = copies

    def wait_at_once(self) -> None:
        """Make exchanges inside of a stage wait for completion at once; for cells, which take turns."""
        for comm in (*self.stages.values(), *self.copies.values()):
            comm.waiting_at_once()

    def holders(self, stages: Iterable[int]) -> frozenset[int]:
        """Return the ranks of a replica that reduce the gradients of parameters used in these stages."""
        return self._ranks(stages, 1 if self._plan.mirror == "point_to_point" else self._plan.directions)

    def users(self, stages: Iterable[int]) -> frozenset[int]:
        """Return the ranks of a replica that compute with parameters used in these stages, in any direction."""
        return self._ranks(stages, self._plan.directions)

    def has(self, stages: Iterable[int]) -> bool:
        """Whether this rank has one of these stages, in any direction."""
        return self.replica.rank in self.users(stages)

    def _ranks(self, stages: Iterable[int], directions: int) -> frozenset[int]:
        return frozenset(
            rank
            for stage in stages
            for direction in range(directions)
            for rank in self.placement.group(stage, direction)
        )

    def reduction(self, holders: frozenset[int]) -> CountedCommunicator | None:
        """Return the group of these ranks in all replicas, None on others. Collective over all trainers when new."""
        if holders not in self._reductions:
            inside = self.replica.rank in holders
            group = _joined(self.all, int(inside), self.all.rank)
            size = self._plan.ranks_per_replica
            members = [rank for rank in range(self.all.size) if (rank % size in holders) == inside]
            levels = two_level(group, [self._nodes[rank] for rank in members], self._plan.reduce_dtype == "bfloat16")
            self._reductions[holders] = CountedCommunicator(levels)
            self._reductions[holders].counts.spans = self.all.counts.spans
        return self._reductions[holders] if self.replica.rank in holders else None

    def counted(self) -> list[CountedCommunicator]:
        """Return all counting communicators, without duplicates."""
        every = [self.all, self.replica, *self.stages.values(), *self.copies.values(), *self._reductions.values()]
        return list({id(comm): comm for comm in every}.values())

    def reset_traffic(self, *others: Groups) -> None:
        """Reset all counts, and those of other groups."""
        for comm in (comm for groups in (self, *others) for comm in groups.counted()):
            comm.counts.reset()

    def record_spans(self, spans: list[Span] | None) -> None:
        """Append the times of all messages to ``spans`` from now on; None: no longer."""
        for comm in self.counted():
            comm.counts.spans = spans

    def traffic(self, *others: Groups) -> dict[str, dict[str, int]]:
        """Return messages and bytes sent by this rank since the last reset, by kind; with those of other groups."""
        every = [comm.counts for groups in (self, *others) for comm in groups.counted()]
        return {
            kind: {
                "messages": sum(counts.messages[kind] for counts in every),
                "bytes": sum(counts.sent_bytes[kind] for counts in every),
            }
            for kind in KINDS
        }

    def seconds(self) -> dict[str, float]:
        """Return this rank's waiting time since the last reset, by kind; see ``CountedCommunicator``."""
        every = self.counted()
        for comm in every:
            comm.counts.collect()
        return {kind: sum(comm.counts.seconds[kind] for comm in every) for kind in KINDS}


def node_name() -> str:
    """Return a name that is equal on all ranks of a node."""
    return socket.gethostname()


def _joined(comm: Communicator, color: int, key: int) -> Communicator:
    group = comm.split(color, key)
    assert group is not None
    return group
