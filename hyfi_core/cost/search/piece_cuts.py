"""Cuts into the pieces of a model that a rank computes again in backward, one at a time, with the least memory.

    forward               ┌────┬─────┬────┬───────┐    what each piece takes is kept until its backward
    backward of piece 2   │ p0 │ p1  │ p2 │               taken(p0) + taken(p1) + peak(p2) + gradients(p3)
                          └────┴─────┴────┘

For a memory limit M, the first k pieces, if the last ends at place b and each of them fits, keep at least

    kept[k][b] = min over a of kept[k-1][a] + taken(a, b)       of those with kept[k-1][a] + peak(a, b) + … <= M

To keep less is always better, so dynamic programming finds whether M is enough, and bisection finds the least M. The
last piece is not computed again, because its backward follows its forward: it is made as large as slightly more memory
allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyfi_core.capture.program import Program
from hyfi_core.cost.memory.forecast import MemoryForecast, StageMaps, forecast_memory, rank_peaks
from hyfi_core.cost.memory.stage_table import StageTable, Table
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan

_MORE = 0.02
"""Fraction of the least memory that is allowed in addition, so that the last piece can be larger."""
# A quarter of the largest int64: sums of two do not overflow.
_NO_ROOM = np.iinfo(np.int64).max // 4


def recomputes_in_pieces(plan: ParallelPlan) -> bool:
    """Whether each rank computes all pieces of the model, and computes them again in backward."""
    return plan.interleave > 1 and len(plan.grids) == 1 and all(map(plan.recomputes, range(plan.stages)))


def least_memory_cuts(plan: ParallelPlan, program: Program) -> tuple[str, ...]:
    """Return the modules after which to cut, so that ranks need the least memory.

    Args:
        plan: a plan that recomputes in pieces; its cuts do not matter.
        program: the captured model, of one micro-batch.

    Raises:
        RequestError: no cut fits into ``plan.memory_bytes``.
    """
    # The memory of all pieces, wherever each begins and ends: all are on the same grid, so one forecast is enough.
    table = StageTable.of(program)
    anywhere = replace(plan, cuts=table.names[: plan.stages - 1])
    search = PieceCuts.of(plan, forecast_memory(program, anywhere, [table.maps] * plan.stages)[0], table)
    needed_bytes = 0
    for more in (_MORE, 0.0):
        cuts = tuple(table.names[place - 1] for place in search.least(more))
        needed_bytes = _needed_bytes(replace(plan, cuts=cuts), program, table.stages(cuts))
        if plan.memory_bytes is None or needed_bytes <= plan.memory_bytes:
            return cuts
    raise RequestError(
        f"plan.memory_bytes is {plan.memory_bytes:,}, but {plan.stages} pieces of this model need {needed_bytes:,}; "
        f"use a larger plan.interleave, more ranks, or plan.interleave=1 with plan.cells and plan.spill"
    )


def _needed_bytes(plan: ParallelPlan, program: Program, stages: Sequence[StageMaps]) -> int:
    """Return what the rank that needs most needs, by the forecast."""
    return max(rank_peaks(replace(plan, cells=None), forecast_memory(program, plan, stages)))


@dataclass(frozen=True)
class PieceCuts:
    """Memory of pieces of a model, from any place (row) to any other (column).

    Attributes:
        count: number of pieces.
        taken: bytes of the inputs of a piece, which are kept until its backward.
        peaks: bytes that a rank needs in the backward of a piece: its peak, and the gradients of the pieces after it.
    """

    count: int
    taken: Table
    peaks: Table

    @classmethod
    def of(cls, plan: ParallelPlan, anywhere: MemoryForecast, table: StageTable) -> PieceCuts:
        """Return the memory of the pieces of a plan, wherever each begins and ends.

        Args:
            plan: a plan that recomputes in pieces.
            anywhere: the forecast of a piece; each field has a table, from any place to any other.
            table: all stages of the model.
        """
        first, later = np.asarray(anywhere.first_bytes), np.asarray(anywhere.later_bytes)
        peaks = first if plan.microbatches == 1 else np.maximum(first, later)
        # Backward of a piece finds the gradients of those after it, which have the size of all weights from its end on.
        gradients_from = np.asarray(table.maps.weights)[:, -1]
        return cls(
            count=plan.stages,
            taken=np.asarray(anywhere.waiting_bytes),
            peaks=peaks + gradients_from[None, :],  # a column of ``peaks`` is the place where pieces end
        )

    def least(self, more: float) -> list[int]:
        """Return the places of the cuts with the least memory.

        Args:
            more: fraction of the least memory that is allowed in addition.
        """
        # Bisection: any cuts fit ``high``, and none fit less than ``low``.
        low, high = 0, int(self.peaks.max() + self.taken.max() * self.count)
        while low < high:
            middle = (low + high) // 2
            if self._cuts(middle) is not None:
                high = middle
            else:
                low = middle + 1
        row = self._cuts(low + int(low * more))
        assert row is not None, "the model has as many places as cuts"
        return row

    def _cuts(self, limit_bytes: int) -> list[int] | None:
        """Return the places of cuts that need at most ``limit_bytes``; None: there are none."""
        last = len(self.taken) - 1
        fits = np.triu(np.ones(self.taken.shape, dtype=bool), 1)  # a piece ends after it begins
        kept: NDArray[np.int64] = np.where(np.arange(last + 1) == 0, 0, _NO_ROOM)
        tables = list[Table]()  # of each piece: what it and those before it keep
        for _ in range(self.count):
            sums = np.where(fits & (kept[:, None] + self.peaks <= limit_bytes), kept[:, None] + self.taken, _NO_ROOM)
            tables.append(sums)
            kept = sums.min(0)
        if kept[last] >= _NO_ROOM:
            return None
        row = [int((tables[-1][:, last] < _NO_ROOM).argmax())]  # the last piece begins as early as possible
        for sums in reversed(tables[1:-1]):
            row.append(int(sums[:, row[-1]].argmin()))
        return row[::-1]
