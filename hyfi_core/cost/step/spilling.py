"""Time that maps take to leave memory and to come back while a step computes, and to be computed again instead.

    forward    operators ──────────────────────▶      the longer of the two: a full memory takes no map before
               maps written ────────▶                 another has been written
    backward   operators ── maps computed again ──▶   the longer of the two: maps are read ahead of their use
               maps read ────────▶

It is assumed that moving neither slows computing down nor waits for it, as with two threads (on GPUs with streams) for
moving beside the one that computes, and that it has the whole of a forward or of a backward of a micro-batch: cells
compute the same layer in turns, so there is always something to move. What is left at the end of either is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.plan.parallel_plan import ParallelPlan


@dataclass(frozen=True, slots=True)
class SpilledMaps:
    """What a rank does for one micro-batch of a stage because not all of its maps are kept in memory.

    Attributes:
        forward_bytes: moved out of memory, and back, during the forward.
        backward_bytes: the same during the backward.
        recomputed: values of the captured model that the backward computes again.
    """

    forward_bytes: float
    backward_bytes: float
    recomputed: tuple[str, ...] = ()


SpillRule = Callable[[Program, ParallelPlan, LoweredPlans], tuple[SpilledMaps, ...]]
"""Returns what each stage of a plan with cells spills, from (captured model, plan with named cuts, lowered plans)."""


@dataclass(frozen=True, slots=True)
class SpillTimes:
    """Times of one micro-batch of a stage.

    Attributes:
        again_s: of what backward computes again.
        moving_s: of moving, in forward and backward together.
        forward_s: by which moving exceeds the forward.
        backward_s: by which it exceeds the backward, ``again_s`` included.
        moved_bytes: in forward and backward together.
    """

    again_s: float = 0.0
    moving_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    moved_bytes: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Time that moving adds to a forward and a backward."""
        return self.forward_s + self.backward_s

    @classmethod
    def of(
        cls,
        maps: SpilledMaps,
        plan: ParallelPlan,
        machine: MachineModel,
        each_s: Mapping[str, float],
        computed_s: tuple[float, float],
    ) -> SpillTimes:
        """Return the times of a stage.

        Args:
            maps: of one of its ranks.
            plan: of the step; all of its ranks move as much at the same time.
            machine: the machine model.
            each_s: value -> time of the operator that computes it, in all cells of a rank.
            computed_s: of a (forward, backward) without moving, waits included.
        """
        again_s = sum(each_s.get(name, 0.0) for name in maps.recomputed)
        written_s, read_s = (
            machine.move_s(moved, plan.ranks, to_disk=plan.spill != "memory")
            for moved in (maps.forward_bytes, maps.backward_bytes)
        )
        forward_s, backward_s = computed_s
        return cls(
            again_s,
            written_s + read_s,
            max(0.0, written_s - forward_s),
            max(0.0, read_s - backward_s - again_s),
            maps.forward_bytes + maps.backward_bytes,
        )


NOTHING_SPILLED = SpillTimes()
