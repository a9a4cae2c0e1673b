"""Modelled time of gradient reductions: in two levels, bucket by bucket, while the backward still runs.

    backward       bucket 0 ready ──── bucket 1 ready ───── bucket 2 ready, end
    within nodes   ├─ 0 ─┤             ├─ 1 ─┤              ├─ 2 ─┤
    between nodes        ├──── 0 ────┤       ├──── 1 ────┤        ├──── 2 ────┤
    back                             ├ 0 ┤               ├ 1 ┤                ├ 2 ┤    what is after the end is exposed

As ``comm.two_level``: a reduction within each node, one between the first ranks of the nodes, and the result from each
of them to the others of its node. Every level works on one bucket at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hyfi_core.cost.machine import MachineModel
from hyfi_core.plan.parallel_plan import BUCKET_BYTES, ParallelPlan
from hyfi_core.plan.placement import Placement


@dataclass(frozen=True)
class GradientHolders:
    """The ranks that reduce the gradients of a stage.

    Attributes:
        nodes: number of nodes with such ranks.
        node_ranks: the largest number of such ranks on one node.
    """

    nodes: int
    node_ranks: int

    @classmethod
    def of(cls, plan: ParallelPlan, stage: int, devices_per_node: int) -> GradientHolders:
        """Return the group of a stage, with ranks in blocks on nodes."""
        placement = Placement.of(plan)
        directions = 1 if plan.mirror == "point_to_point" else placement.directions
        holders = {rank for direction in range(directions) for rank in placement.group(stage, direction)}
        firsts = range(0, plan.ranks, placement.size)  # of all planes of all replicas
        counts = Counter((first + rank) // devices_per_node for first in firsts for rank in holders)
        return cls(len(counts), max(counts.values()))

    def exposed_s(self, gradients: Iterable[tuple[float, float]], backward_s: float, machine: MachineModel) -> float:
        """Return the seconds by which reductions lengthen a step: what the backward does not hide.

        On CPUs, reducing within a node is never hidden: the cores that compute also copy and add.

        Args:
            gradients: (time at which a gradient is complete, its bytes), in order of time.
            backward_s: time at which the backward ends.
            machine: the machine model.
        """
        if self.nodes * self.node_ranks == 1:
            return 0.0
        # When each level is free again: the next bucket waits for it.
        free_s = [0.0] * 3
        bucket_bytes, end_s, in_order = 0.0, 0.0, list(gradients)
        for number, (complete_s, length) in enumerate(in_order, 1):
            bucket_bytes += length
            # As the engine: small gradients share a message, and the last one is sent as it is.
            if bucket_bytes >= BUCKET_BYTES or number == len(in_order):
                end_s = complete_s
                for level, seconds in enumerate(self._levels_s(bucket_bytes, machine)):
                    end_s = free_s[level] = max(end_s, free_s[level]) + seconds
                bucket_bytes = 0.0
        if machine.device != "cpu":
            return max(0.0, end_s - backward_s)
        # Copying and adding take time of the computing cores, even before the backward ends.
        return max(self._on_cores_s(sum(length for _, length in in_order), machine), end_s - backward_s)

    def _on_cores_s(self, length: float, machine: MachineModel) -> float:
        """Return the seconds that CPU cores spend on reducing ``length`` bytes of gradients within nodes."""
        if self.node_ranks == 1:
            return 0.0
        levels = self._levels_s(length, machine)
        return levels[0] + sum(levels[2:])

    def _levels_s(self, length: float, machine: MachineModel) -> tuple[float, ...]:
        """Return the seconds of a bucket of ``length`` bytes on each level: (within nodes, between nodes, back).

        Back: the first rank of a node, which has the sum of all, sends it to the others of its node.

        One level only if all ranks are on one node, or each is on its own.
        """
        if self.nodes == 1:
            return (machine.all_reduce_s(self.node_ranks, length),)
        across_s = machine.leaders_s(self.nodes, length, self.node_ranks)
        if self.node_ranks == 1:
            return (across_s,)
        # ``kernel_s`` stands for the start of its messages; their latencies are not counted.
        back_s = machine.kernel_s + machine.messages_s(0, (self.node_ranks - 1) * length)
        return machine.all_reduce_s(self.node_ranks, length), across_s, back_s
