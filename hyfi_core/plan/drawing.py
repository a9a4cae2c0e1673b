"""A plan drawn as text: stages, grids, directions and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyfi_core.plan.placement import Placement

if TYPE_CHECKING:
    from hyfi_core.plan.parallel_plan import ParallelPlan


def draw(plan: ParallelPlan) -> str:
    """Return stages, grids, directions and ranks as text for people."""
    placement = Placement.of(plan)
    head = f"{plan.ranks} trainers: {plan.replicas} replica(s) of {plan.ranks_per_replica}, {plan.stages} stage(s)"
    lines = [f"{head}, {plan.microbatches} micro-batch(es), schedule {plan.schedule}"]
    if plan.shares:
        lines.append(f"of every {sum(plan.shares)} samples the replicas take {', '.join(map(str, plan.shares))}")
    width = len(str(plan.ranks - 1))
    for replica in range(plan.replicas):
        first = replica * plan.ranks_per_replica
        for direction in range(plan.directions):
            for stage in range(plan.stages):
                lines += _stage(plan, placement, replica, first, direction, stage, width)
    return "\n".join(lines)


def _stage(
    plan: ParallelPlan, placement: Placement, replica: int, first: int, direction: int, stage: int, width: int
) -> list[str]:
    rows, columns = placement.grids[stage]
    way = f", direction {direction}" if plan.directions == 2 else ""
    until = f", to the end of {plan.cuts[stage]}" if plan.cuts != "auto" and stage < plan.stages - 1 else ""
    again = ", recomputed" if plan.recomputes(stage) else ""
    lines = [f"replica {replica}{way}, stage {stage}: {rows} x {columns} ranks{until}{again}"]
    group = [first + rank for rank in placement.group(stage, direction)]
    for row in range(rows):
        lines.append("    " + " │ ".join(f"{rank:>{width}}" for rank in group[row * columns : (row + 1) * columns]))
    return lines
