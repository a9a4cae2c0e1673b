"""Cuts into pieces that a rank computes again one after the other, with which it needs the least memory.

    forward               ┌────┬─────┬────┬───────┐    what each piece takes is kept until its backward
    backward of piece 2   │ p0 │ p1  │ p2 │               taken(p0) + taken(p1) + peak(p2)
                          └────┴─────┴────┘

For a limit M, what the first k pieces keep if they end at place b and each of them fits is at least

    kept[k][b] = min over a of kept[k-1][a] + taken(a, b)       of those with kept[k-1][a] + peak(a, b) <= M

Less is always better, so dynamic programming finds whether M is enough, and bisection the least M that is. The last
piece is not computed again: its backward follows its forward. So it is made as large as little more memory allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyfi_core.capture.program import Program
from hyfi_core.cost.memory.forecast import MemoryForecast, forecast_memory
from hyfi_core.cost.memory.stage_table import StageTable, Table
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan

_MORE = 0.02
"""Of the least memory, so that the last piece is larger."""
_NO_ROOM = np.iinfo(np.int64).max // 4


def recomputes_in_pieces(plan: ParallelPlan) -> bool:
    """Whether each rank computes all pieces of the model, and again in backward."""
    return plan.interleave > 1 and len(plan.grids) == 1 and all(map(plan.recomputes, range(plan.stages)))


def least_memory_cuts(plan: ParallelPlan, program: Program) -> tuple[str, ...]:
    """Return the modules after which to cut.

    Args:
        plan: it recomputes in pieces; its cuts do not matter.
        program: the captured model, of one micro-batch.

    Raises:
        RequestError: no cut fits into ``plan.memory_bytes``.
    """
    table = StageTable.of(program)
    anywhere = replace(plan, cuts=table.names[: plan.stages - 1])
    forecast = forecast_memory(program, anywhere, [table.maps] * plan.stages)[0]
    limit_bytes, row = PieceCuts.of(plan, forecast).least()
    needed_bytes = limit_bytes + int(np.asarray(forecast.state_bytes)[0, -1])
    if plan.memory_bytes is not None and needed_bytes > plan.memory_bytes:
        raise RequestError(
            f"plan.memory_bytes is {plan.memory_bytes:,}, but {plan.stages} pieces of this model need at least "
            f"{needed_bytes:,}; use a larger plan.interleave, more ranks, or plan.cells with plan.spill"
        )
    return tuple(table.names[place - 1] for place in row)


@dataclass(frozen=True)
class PieceCuts:
    """Pieces of a model, wherever they begin (row) and end (column).

    Attributes:
        count: number of pieces.
        taken: bytes of what a piece takes.
        peaks: bytes that a piece needs in its backward.
    """

    count: int
    taken: Table
    peaks: Table

    @classmethod
    def of(cls, plan: ParallelPlan, anywhere: MemoryForecast) -> PieceCuts:
        """Return those of a plan.

        Args:
            plan: it recomputes in pieces.
            anywhere: the forecast of a piece, a table in each field.
        """
        first, later = np.asarray(anywhere.first_bytes), np.asarray(anywhere.later_bytes)
        peaks = first if plan.microbatches == 1 else np.maximum(first, later)
        return cls(plan.stages, np.asarray(anywhere.waiting_bytes), peaks)

    def least(self) -> tuple[int, list[int]]:
        """Return the least limit that is enough, or little more, and the places of the cuts."""
        low, high = 0, int(self.peaks.max() + self.taken.max() * self.count)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._cuts(middle) is not None else (middle + 1, high)
        limit_bytes = low + int(low * _MORE)
        row = self._cuts(limit_bytes)
        assert row is not None, "the model has as many places as cuts"
        return limit_bytes, row

    def _cuts(self, limit_bytes: int) -> list[int] | None:
        """Return the places of the cuts with which a limit is enough; None: there are none."""
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
