"""Time that maps take to leave memory and to come back while a step computes, and to be computed again instead.

    forward    operators ──────────────────────▶      the longer of the two: a full memory takes no map before
               maps written ────────▶                 another has been written
    backward   operators ── maps computed again ──▶   the longer of the two: maps are read ahead of their use
               maps read ────────▶

The model assumes that moving neither slows computing down nor waits for it (threads, or streams of a GPU, move maps
beside the thread that computes), and that it lasts through the whole forward or backward of a micro-batch: cells
compute the same layer in turns, so there is always something to move. Moving that remains at the end is exposed.
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
    """Maps of one micro-batch of a stage that a rank moves or computes again, because memory is limited.

    Attributes:
        forward_bytes: bytes moved out of memory and back during the forward.
        backward_bytes: bytes moved out of memory and back during the backward.
        recomputed: values of the captured model that the backward computes again.
    """

    forward_bytes: float
    backward_bytes: float
    recomputed: tuple[str, ...] = ()


SpillRule = Callable[[Program, ParallelPlan, LoweredPlans], tuple[SpilledMaps, ...]]
"""Returns what each stage of a plan with cells spills, from (captured model, plan with named cuts, lowered plans)."""


@dataclass(frozen=True, slots=True)
class SpillTimes:
    """Times that spilling takes for one micro-batch of a stage.

    Attributes:
        again_s: time of maps that backward computes again.
        moving_s: time of moving, in forward and backward together.
        forward_s: time by which moving is longer than the forward.
        backward_s: time by which moving is longer than the backward with ``again_s``.
        moved_bytes: bytes moved, in forward and backward together.
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
            maps: what one of its ranks moves or computes again.
            plan: the plan of the step; all of its ranks move as much at the same time.
            machine: the machine model.
            each_s: value -> time of the operator that computes it, in all cells of a rank.
            computed_s: time of (forward, backward) without moving, waits included.
        """
        again_s = sum(each_s.get(name, 0.0) for name in maps.recomputed)
        # In both passes, maps move out of memory and back.
        moving_in_forward_s, moving_in_backward_s = (
            machine.move_s(moved, plan.ranks, to_disk=plan.spill != "memory")
            for moved in (maps.forward_bytes, maps.backward_bytes)
        )
        computed_forward_s, computed_backward_s = computed_s
        return cls(
            again_s=again_s,
            moving_s=moving_in_forward_s + moving_in_backward_s,
            # Maps are moved while others are computed: only what takes longer than that counts.
            forward_s=max(0.0, moving_in_forward_s - computed_forward_s),
            backward_s=max(0.0, moving_in_backward_s - computed_backward_s - again_s),
            moved_bytes=maps.forward_bytes + maps.backward_bytes,
        )


NOTHING_SPILLED = SpillTimes()
