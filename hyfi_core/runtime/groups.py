"""Groups: the communicators of one rank, one for each group that it belongs to."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from hyfi_core.comm.alone import AloneCommunicator
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
        replica_index: number of this replica.
        replica: the ranks of this replica, plane after plane.
        plane: the ranks of this rank's plane, which hold the model once; used between stages.
        stages: (stage, direction) -> the ranks of the stage, in the order of its parts, for all stages of this rank.
        placement: which ranks of a plane hold which stage.
        all_replicas: the groups of ``stages``, but with the ranks of all replicas if batch norms are synchronised.
        between_planes: the ranks of this replica with the same position in all planes, in the order of planes.
    """

    def __init__(self, comm: Communicator, plan: ParallelPlan, placement: Placement) -> None:
        self.placement = placement
        self._plan = plan
        self.all = CountedCommunicator(comm)
        # Ranks are numbered [replica][plane][position]: plane after plane, each with ``placement.size`` ranks.
        plane_number, position = divmod(comm.rank, placement.size)  # planes are counted over all replicas
        self.replica_index = plane_number // plan.branches
        size, branches = placement.size, plan.branches
        plane_first, replica_first = plane_number * size, self.replica_index * branches * size
        # Every rank makes the same calls in this order, each with the members of its own group: creation is collective.
        plane = _subgroup(comm, range(plane_first, plane_first + size))
        replica = _subgroup(comm, range(replica_first, replica_first + branches * size)) if branches > 1 else plane
        if placement.stages > 1 or placement.directions > 1:
            # Between stages a rank has sends and receives without a common order, which one NCCL stream could not run.
            plane = with_pair_channels(plane)
        self.plane = CountedCommunicator(plane)
        self.replica = CountedCommunicator(replica) if plan.branches > 1 else self.plane
        between_planes = (
            _subgroup(comm, range(replica_first + position, replica_first + branches * size, size))
            if branches > 1
            else None
        )
        self.between_planes = CountedCommunicator(AloneCommunicator() if between_planes is None else between_planes)
        self.stages: dict[tuple[int, int], CountedCommunicator] = {}
        self.all_replicas: dict[tuple[int, int], CountedCommunicator] = {}
        self._reductions: dict[frozenset[int], CountedCommunicator | None] = {}
        self._outputs: CountedCommunicator | None = None
        self._nodes: list[str] = comm.broadcast_object(comm.gather_objects(node_name()))
        grids = len(plan.grids)
        for direction in range(plan.directions):
            # With ``interleave`` stages share grids: stage s is on grid s mod ``grids``, and needs no group of its own.
            grid = next(g for g in range(grids) if position in placement.group(g, direction))
            # In the order of parts, in both directions: the group's rank is the position in the stage's grid.
            ranks = placement.group(grid, direction)
            synchronised = group = CountedCommunicator(_subgroup(comm, [plane_first + rank for rank in ranks]))
            if plan.sync_batch_norm:
                # First ranks of the planes with this plane's branches, one of each replica.
                firsts = range(plane_number % branches * size, comm.size, branches * size)
                members = [first + rank for first in firsts for rank in sorted(ranks)]
                synchronised = CountedCommunicator(_subgroup(comm, members))
            for stage in range(grid, placement.stages, grids):
                self.stages[stage, direction] = group
                self.all_replicas[stage, direction] = synchronised

    def holders(self, stages: Iterable[int]) -> frozenset[int]:
        """Return the ranks of a plane that reduce the gradients of parameters used in these stages."""
        return self._ranks(stages, 1 if self._plan.mirror == "point_to_point" else self._plan.directions)

    def users(self, stages: Iterable[int]) -> frozenset[int]:
        """Return the ranks of a plane that compute with parameters used in these stages, in any direction."""
        return self._ranks(stages, self._plan.directions)

    def has(self, stages: Iterable[int]) -> bool:
        """Whether this rank has one of these stages, in any direction."""
        return self.plane.rank in self.users(stages)

    def _ranks(self, stages: Iterable[int], directions: int) -> frozenset[int]:
        """Return the ranks of a plane that hold any of these stages in the first ``directions`` directions."""
        return frozenset(
            rank
            for stage in stages
            for direction in range(directions)
            for rank in self.placement.group(stage, direction)
        )

    def reduction(self, holders: frozenset[int]) -> CountedCommunicator | None:
        """Return the group of the ranks ``holders`` of every plane, None on other ranks.

        The first call for a set of holders is collective over all trainers.
        """
        if holders not in self._reductions:
            # Without members a rank still takes part in the collective call, and gets None.
            first_ranks = range(0, self.all.size, self.placement.size) if self.plane.rank in holders else ()
            members = [first + rank for first in first_ranks for rank in sorted(holders)]
            group = self.all.subgroup(members)
            if group is None:
                self._reductions[holders] = None
            else:
                nodes = [self._nodes[rank] for rank in members]
                counted = CountedCommunicator(two_level(group, nodes, self._plan.reduce_dtype == "bfloat16"))
                # ``record_spans`` may have been called before this group existed.
                counted.counts.spans = self.all.counts.spans
                self._reductions[holders] = counted
        return self._reductions[holders]

    def sharers(self) -> int:
        """Return the number of ranks on this node, this one included."""
        return self._nodes.count(self._nodes[self.all.rank])

    def prepare_outputs(self) -> None:
        """Create ``outputs``, once. Collective over all trainers."""
        if self._outputs is None:
            holders = self._ranks({self.placement.stages - 1}, self._plan.directions)
            planes = range(0, self.all.size, self.placement.size) if self.plane.rank in holders else ()
            group = self.all.subgroup([first + rank for first in planes for rank in sorted(holders)])
            self._outputs = CountedCommunicator(AloneCommunicator() if group is None else group)
            self._outputs.counts.spans = self.all.counts.spans

    def outputs(self) -> CountedCommunicator:
        """Return the ranks that compute the model's output, in any direction, plane and replica."""
        assert self._outputs is not None, "prepare_outputs comes first"
        return self._outputs

    def counted(self) -> list[CountedCommunicator]:
        """Return all counting communicators, without duplicates."""
        every = [
            self.all,
            self.replica,
            self.plane,
            self.between_planes,
            *self.stages.values(),
            *self.all_replicas.values(),
        ]
        every += [] if self._outputs is None else [self._outputs]
        every += [comm for comm in self._reductions.values() if comm is not None]
        return list({id(comm): comm for comm in every}.values())

    def reset_traffic(self, *more: Groups) -> None:
        """Reset the counts of these groups, and of ``more``."""
        for comm in (comm for groups in (self, *more) for comm in groups.counted()):
            comm.counts.reset()

    def record_spans(self, spans: list[Span] | None) -> None:
        """Append the times of all messages to ``spans`` from now on; None: stop recording."""
        for comm in self.counted():
            comm.counts.spans = spans

    def traffic(self, *more: Groups) -> dict[str, dict[str, int]]:
        """Return kind -> messages and bytes sent by this rank since the last reset; ``more``: groups to add."""
        every = [comm.counts for groups in (self, *more) for comm in groups.counted()]
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


def _subgroup(comm: Communicator, members: Sequence[int]) -> Communicator:
    """Return the group of these ranks, this one among them (collective over ``comm``)."""
    group = comm.subgroup(members)
    assert group is not None
    return group
