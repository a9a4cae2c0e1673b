"""The fastest cuts with which a plan fits into memory.

    cuts              0.2 | 0.5 | 0.9     seconds    bytes of the rank that needs most
    fastest           a     c     f       1.0        9 GB      does not fit into 8 GB
    fastest that fit  a     b     e       1.1        7 GB

In one direction, dynamic programming over stages finds those with the shortest slowest stage and those with the
shortest sum; the better one is taken. In two directions a rank holds several stages, so that no stage fits or fails on
its own: all cuts are rated, or if they are too many, a coarse choice of them and then what is near the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import combinations, product
from math import comb, prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyfi_core.capture.program import Program
from hyfi_core.cost.memory.forecast import MemoryForecast, forecast_memory, held_bytes, max_of
from hyfi_core.cost.memory.stage_table import StageTable, Table
from hyfi_core.cost.search.plan_bounds import ONE_IN_FLIGHT
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.schedule.in_flight import Moment, fullest_moments, microbatches_in_flight

SecondsTable = NDArray[np.float64]
"""Seconds of the stage from place `row` to place `column`."""
CutRows = NDArray[np.int64]
"""Choices of cuts, one for each row: the indices of the places where a plan is cut."""
_Number = TypeVar("_Number", np.int64, np.float64)
_MOST_ROWS = 5_000
"""Largest number of choices that are rated in the coarse search."""
_BESIDE = 1
"""Number of choices beside the fastest one that are tried, too."""


@dataclass(frozen=True)
class StagesAnywhere:
    """Memory of each stage of a plan, wherever it begins and ends.

    Attributes:
        plan: the plan of the stages; its cuts do not matter.
        names: the module that ends at each place but the first and the last.
        stages: the forecast of each stage; each field has a ``Table``, from any place to any other.
        error_factor: a rank needs at most this many times its forecast.
    """

    plan: ParallelPlan
    names: tuple[str, ...]
    stages: tuple[MemoryForecast, ...]
    error_factor: float

    @classmethod
    def of(cls, plan: ParallelPlan, program: Program, table: StageTable, error_factor: float) -> StagesAnywhere:
        """Return the memory of the stages of a plan, wherever each begins and ends.

        Args:
            plan: its cuts do not matter.
            program: the captured model, of one micro-batch.
            table: all stages of the same program.
            error_factor: a rank needs at most this many times its forecast.
        """
        # Any cuts will do: the table has the bytes of all stages, as arrays, and not only those of the plan's stages.
        anywhere = replace(plan, cuts=table.names[: plan.stages - 1])
        return cls(plan, table.names, forecast_memory(program, anywhere, [table.maps] * plan.stages), error_factor)

    @cached_property
    def bytes(self) -> tuple[Table, ...]:
        """For each stage, the bytes that a rank needs at most for it, without other stages on the same rank."""
        tables: dict[int, Table] = {}
        for hosted, moments in fullest_moments(self.plan).items():
            for at, (stage, _) in enumerate(hosted):
                # The moments in which this stage runs, as if the rank held no other stage.
                alone = {
                    Moment(
                        running=0,
                        waiting=(moment.waiting[at],),
                        gradients=(moment.gradients[at],),
                        between=moment.between[at : at + 1],
                    )
                    for moment in moments
                    if moment.running == at
                }
                needs = np.asarray(held_bytes([self.stages[stage]], alone))
                # In two directions two ranks hold the stage: with the smaller need, no cuts that fit are ruled out.
                tables[stage] = np.minimum(needs, tables.get(stage, needs))
        return tuple(self._most(tables[stage]) for stage in range(len(self.stages)))

    def least_bytes(self) -> int:
        """Return the bytes of the largest rank with the best cuts, by the forecast; in two directions a lower bound."""
        least, _ = shortest([table.astype(np.float64) for table in self.bytes], np.maximum)
        return max(int(least), int(self.error_factor * self.stages[0].start_bytes))

    def needed(self, rows: CutRows) -> Table:
        """Return, for each choice of cuts, the bytes of the rank that needs most, by the forecast."""
        ends = self.ends(rows)
        chosen = [_chosen(stage, ends[:, at], ends[:, at + 1]) for at, stage in enumerate(self.stages)]
        by_rank = (
            held_bytes([chosen[stage] for stage, _ in hosted], moments)
            for hosted, moments in fullest_moments(self.plan).items()
        )
        return self._most(np.maximum(max_of(by_rank), self.stages[0].start_bytes))

    def most_of_a_rank(self, each: NDArray[_Number]) -> NDArray[_Number]:
        """Return, for each choice of cuts, the largest sum of ``each`` over the stages that one rank holds.

        Args:
            each: a number for each stage (first axis) and each choice of cuts.
        """
        moments = fullest_moments(self.plan)
        sums: NDArray[_Number] = np.max([each[[stage for stage, _ in hosted]].sum(0) for hosted in moments], axis=0)
        return sums

    def at(self, tables: Sequence[NDArray[_Number]], rows: CutRows) -> NDArray[_Number]:
        """Return the entry of each stage's table (first axis) for each choice of cuts (second axis).

        Args:
            tables: for each stage, a table from any place to any other.
            rows: the choices.
        """
        ends = self.ends(rows)
        numbers: NDArray[_Number] = np.array([t[ends[:, s], ends[:, s + 1]] for s, t in enumerate(tables)])
        return numbers

    def _most(self, forecast: Table) -> Table:
        """Return the bytes that a rank needs at most if this is its forecast."""
        return (self.error_factor * forecast).astype(np.int64)

    def ends(self, rows: CutRows) -> CutRows:
        """Return each choice of cuts between the first and the last place: stage s is from ends[s] to ends[s + 1]."""
        return np.pad(rows, ((0, 0), (1, 1)), constant_values=((0, 0), (0, len(self.names) + 1)))


def _chosen(stage: MemoryForecast, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> MemoryForecast:
    """Return the forecast of a stage with arrays: one number for each pair of ``begins`` and ``ends``."""
    tables: dict[str, Any] = {field.name: getattr(stage, field.name) for field in fields(stage)}
    tables |= {name: table[begins, ends] for name, table in tables.items() if isinstance(table, np.ndarray)}
    return MemoryForecast(**tables)


def average_bytes(plan: ParallelPlan, program: Program, table: StageTable) -> int:
    """Return a lower bound of the bytes that ranks need on average, by the forecast, wherever the plan is cut.

    Args:
        plan: any; its cuts do not matter.
        program: the captured model, of one micro-batch.
        table: all stages of the same program.
    """
    anywhere = replace(plan, cuts=table.names[: plan.stages - 1])
    # The whole model as it would be on the grid of each stage.
    wholes, sizes = forecast_memory(program, anywhere, table.stages(()) * plan.stages), [prod(g) for g in plan.grids]
    always_bytes, saved_bytes = [], []
    for stage, (whole, size) in enumerate(zip(wholes, sizes, strict=True)):
        waiting = whole.waiting_bytes
        if plan.divides_backwards:  # a micro-batch in flight may also be between the two parts of its backward
            waiting = min(waiting, whole.between_bytes)
        always_bytes.append(plan.directions * size * whole.written_bytes)
        saved_bytes.append(size * (whole.saved_bytes + (microbatches_in_flight(plan, stage) - 1) * waiting))
    # Any part of the model may be on any grid, so take the minimum over grids. Maps count once, not for both
    # directions: two stages of a rank need not have most of their micro-batches in flight at the same time.
    return (min(always_bytes) + min(saved_bytes)) // sum(sizes)


@dataclass(frozen=True)
class FittingCuts:
    """A search for the fastest cuts that fit.

    Attributes:
        stages: the memory of the plan's stages.
        seconds: for each stage, forward and backward of a micro-batch, with the messages at its end.
        room_bytes: memory that a rank has for the plan.
    """

    stages: StagesAnywhere
    seconds: tuple[SecondsTable, ...]
    room_bytes: int

    def fastest(self) -> tuple[tuple[str, ...] | None, int]:
        """Return (modules after which to cut, bytes of the rank that then needs most, by the forecast).

        If no cuts fit, it returns (None, the fewest bytes that the search has seen).
        """
        best = self._best
        rank_bytes = int(self.stages.needed(best[None])[0])
        return self._names(best) if rank_bytes <= self.room_bytes else None, rank_bytes

    def beside(self) -> tuple[tuple[str, ...], ...]:
        """Return cuts that fit and differ from those of ``fastest`` by one place; with halos they may be faster."""
        best, cuts = self._best, self.stages.plan.stages - 1
        # Each cut one place later, and each one earlier.
        rows = best + np.concatenate([np.eye(cuts, dtype=np.int64), -np.eye(cuts, dtype=np.int64)])
        rows = rows[self._in_order(rows)]
        rows = rows[self.stages.needed(rows) <= self.room_bytes]
        return tuple(self._names(row) for row in rows[self._order(rows)[:_BESIDE]]) if len(rows) else ()

    @cached_property
    def _best(self) -> CutRows:
        """The cuts that ``_order`` puts first: the fastest that fit, else those that need the fewest bytes."""
        rows = self._by_stages() if self.stages.plan.directions == 1 else self._near_best()
        fastest: CutRows = rows[self._order(rows)[0]]
        return fastest

    def _names(self, row: CutRows) -> tuple[str, ...]:
        return tuple(self.stages.names[position - 1] for position in row)

    def _in_order(self, rows: CutRows) -> NDArray[np.bool_]:
        """Return which rows are valid: cuts in ascending order, so that no stage is empty."""
        return np.asarray((np.diff(self.stages.ends(rows)) > 0).all(1))

    def _order(self, rows: CutRows) -> NDArray[np.intp]:
        """Return the indices of choices of cuts, best first: by bytes beyond a rank's room, then by a step's time."""
        plan, each_s = self.stages.plan, self.stages.at(self.seconds, rows)
        rounds = plan.microbatches // plan.directions
        # A lower bound of the time, by the formulas of ``least_step_s``: ranks are busy with all stages that they hold.
        seconds = rounds * self.stages.most_of_a_rank(each_s)
        if plan.schedule in ONE_IN_FLIGHT:
            seconds = np.maximum(seconds, rounds * each_s.sum(0))
        elif plan.directions == 1:  # every stage waits for those before it
            seconds = (rounds - 1) * each_s.max(0) + each_s.sum(0)
        bytes_beyond = np.maximum(0, self.stages.needed(rows) - self.room_bytes)
        return np.lexsort((seconds, bytes_beyond))  # the last key counts first

    def _by_stages(self) -> CutRows:
        """Return three choices that fit, for one direction; if none fits, the one that needs the fewest bytes.

        The choices have the shortest slowest stage, the shortest sum among these, and the shortest sum of all.
        """
        tables = zip(self.seconds, self.stages.bytes, strict=True)
        seconds = [np.where(stage_bytes <= self.room_bytes, table, np.inf) for table, stage_bytes in tables]
        slowest_s, row = shortest(seconds, np.maximum)
        if slowest_s == np.inf:
            return shortest([table.astype(np.float64) for table in self.stages.bytes], np.maximum)[1][None]
        # Without stages that take longer than that: the shortest sum among cuts with the shortest slowest stage.
        even = [np.where(table <= slowest_s, table, np.inf) for table in seconds]
        return np.array([row, shortest(even, np.add)[1], shortest(seconds, np.add)[1]])

    def _near_best(self) -> CutRows:
        """Return the best choice of cuts, as one row; of too many, that of a coarse search and steps from there."""
        cuts, places = self.stages.plan.stages - 1, len(self.stages.names)
        # Of the places for cuts, as many, evenly spread, as have at most _MOST_ROWS combinations; mostly all places.
        count = next(count for count in range(places, cuts - 1, -1) if comb(count, cuts) <= _MOST_ROWS)
        spread = np.unique(np.linspace(1, places, count).round().astype(np.int64))
        rows = spread[_combinations(count, cuts)]
        # A step moves cuts by this many places; 0: all choices have been rated, so no step is needed.
        best, step = rows[self._order(rows)[0]], 0 if count == places else places // count
        while step:
            rows = best + step * _neighbours(cuts)
            rows = rows[self._in_order(rows)]
            first = self._order(rows)[0]
            # Row 0 is no step at all: if it is the best, halve the step.
            best, step = rows[first], step if first else step // 2
        return np.array(best)[None]


@lru_cache(maxsize=64)
def _combinations(places: int, cuts: int) -> CutRows:
    return np.array(list(combinations(range(places), cuts)), dtype=np.int64)


@cache
def _neighbours(cuts: int) -> CutRows:
    """Return all steps that move each cut by -1, 0 or 1 place; the first moves none."""
    return np.array(list(product((0, -1, 1), repeat=cuts)), dtype=np.int64)


def shortest(
    costs: Sequence[SecondsTable], together: Callable[[SecondsTable, SecondsTable], SecondsTable]
) -> tuple[float, CutRows]:
    """Return (least cost of all stages together, cuts with this cost), by dynamic programming.

    The cost is infinite if there are no such cuts.

    Args:
        costs: for each stage, its cost from any place to any other.
        together: the cost of two parts together: their maximum or sum.
    """
    count = costs[0].shape[0]
    after = np.triu(np.ones((count, count), dtype=bool), 1)  # a stage ends after it begins
    before, choices = np.where(np.arange(count) == 0, 0.0, np.inf), []
    for table in costs:
        total = together(before[:, None], np.where(after, table, np.inf))
        choices.append(total.argmin(0))
        before = total.min(0)
    at, row = count - 1, []
    for choice in reversed(choices[1:]):
        at = int(choice[at])
        row.append(at)
    return float(before[-1]), np.array(row[::-1], dtype=np.int64)
