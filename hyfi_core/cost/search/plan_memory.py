"""The ways in which a plan fits into memory: as it is, recomputing, or with cuts at other places."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from hyfi_core.cost.memory.forecast import FORECAST_OFF, SPILLING_OFF, StageMaps
from hyfi_core.cost.memory.stage_table import StageTable
from hyfi_core.cost.search.fitting_cuts import FittingCuts, SecondsTable, StagesAnywhere, average_bytes
from hyfi_core.cost.search.plan_bounds import PlanBounds, Programs
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.step.simulator import rank_bytes
from hyfi_core.plan.parallel_plan import ParallelPlan

_Cuts = tuple[str, ...]


@dataclass
class StudiedMemory:
    """Memory of stages, as far as it has been computed; it depends on the model alone.

    Attributes:
        maps: (images of a micro-batch, cuts) -> the bytes of each stage.
        tables: images of a micro-batch -> the table of all stages.
    """

    maps: dict[tuple[int, tuple[str, ...] | str], list[StageMaps]] = field(default_factory=dict)
    tables: dict[int, StageTable] = field(default_factory=dict)


class PlanMemory:
    """Computes what plans need, and the ways in which they fit.

    ``ways`` reads memory from the tables of all stages, because few of the many plans that it is asked for are ever
    cut. ``fits`` and ``needed_bytes`` do so where the tables are exact; else they cut the model.

    Args:
        programs: captures the model.
        request: batch, machine and limits.
        bounds: lower bounds of step times, for the same model and request.
        memory: results of other searches for the same programs; those of this one are added.
    """

    def __init__(
        self, programs: Programs, request: PlanRequest, bounds: PlanBounds, memory: StudiedMemory | None = None
    ) -> None:
        self._programs, self._request, self._bounds = programs, request, bounds
        # A rank needs at most this many times its forecast.
        self._error_factor = FORECAST_OFF[request.machine.device]
        memory = StudiedMemory() if memory is None else memory
        self._maps, self._tables = memory.maps, memory.tables
        # By the fields of a plan on which they depend: a lower bound of its bytes, the cuts to try, and for plans that
        # cannot fit (that bound, one such plan).
        self._bounds_of: dict[Hashable, int] = {}
        self._chosen: dict[Hashable, tuple[_Cuts, ...]] = {}
        self._refused: dict[Hashable, tuple[int, ParallelPlan]] = {}
        self._smallest: int | None = None  # the fewest bytes of a plan that does not fit

    def needed_bytes(self, plan: ParallelPlan) -> int:
        """Return the bytes of the rank that needs most, its process included.

        Args:
            plan: with named cuts.

        Raises:
            RequestError: the model cannot be cut so.
        """
        key = (self._images(plan), plan.cuts)
        if key not in self._maps:
            table, pieces = self._table(plan), self._bounds.pieces(plan)
            cuts = () if plan.cuts == "auto" else plan.cuts
            # The table knows stages that begin and end at its places, and no copies of operators.
            in_table = not table.copies and set(cuts) <= set(table.names)
            program = self._programs(self._images(plan))
            self._maps[key] = table.stages(cuts) if in_table else StageMaps.of(program, pieces)
        return self._forecast(plan, self._maps[key])

    def fits(self, plan: ParallelPlan) -> bool:
        """Whether a plan with named cuts fits, from the stages themselves.

        Raises:
            RequestError: the model cannot be cut so.
        """
        return self.counted(self.needed_bytes(plan)) <= self._request.memory_bytes

    def ways(self, plan: ParallelPlan) -> Iterator[ParallelPlan]:
        """Yield the variants of a plan that fit and may be the fastest: as it is, with other cuts, recomputing.

        Recomputation and other cuts cost time, so only a plan that does not fit gets them. Either may be the faster
        one. If recomputation alone is enough, the plan keeps its cuts.

        Args:
            plan: with its fastest cuts, without recomputation.
        """
        again = replace(plan, recompute=True)
        if self._may_fit(plan):
            if self._fits(plan):
                yield plan
                return
            yield from self._with_other_cuts(plan)
        if self._may_fit(again):
            if self._fits(again):
                yield again
            else:
                yield from self._with_other_cuts(again)

    def least_bytes(self) -> int | None:
        """Return the least memory of all plans that did not fit, with any cuts; None: all fit."""
        for bound, plan in sorted(self._refused.values(), key=lambda refusal: refusal[0]):
            if self._smallest is not None and bound >= self._smallest:
                break
            # With no room at all, the search returns the fewest bytes of any cuts.
            _, plan_bytes = FittingCuts(self._anywhere(plan), self._seconds(plan), room_bytes=0).fastest()
            self.counted(self._request.held_bytes + plan_bytes)
        return self._smallest

    def _may_fit(self, plan: ParallelPlan) -> bool:
        """Whether a plan may fit with some cuts; False is certain. A quick test that rules out most plans."""
        if plan.stages == 1:
            return True
        # The bound depends on nothing else; on grids, only by their numbers of ranks.
        key = self._images(plan), tuple(map(prod, plan.grids)), plan.schedule, plan.microbatches, plan.recompute
        if key not in self._bounds_of:
            room = self._request.memory_bytes - self._request.held_bytes
            least = int(self._error_factor * average_bytes(plan, self._programs(self._images(plan)), self._table(plan)))
            if least <= room:  # the tables of all stages take longer: only where the average would fit
                least = max(least, self._anywhere(plan).least_bytes())
            self._bounds_of[key] = self._request.held_bytes + least
            if least > room:
                self._refused[key] = self._bounds_of[key], plan
        return self._bounds_of[key] <= self._request.memory_bytes

    def _fits(self, plan: ParallelPlan) -> bool:
        """Whether a plan with named cuts fits, from the tables of all stages: cuts take no time."""
        cuts, table = () if plan.cuts == "auto" else plan.cuts, self._table(plan)
        if not set(cuts) <= set(table.names):
            return self.fits(plan)
        return self.counted(self._forecast(plan, table.stages(cuts))) <= self._request.memory_bytes

    def _forecast(self, plan: ParallelPlan, stages: list[StageMaps]) -> int:
        """Return the bytes of the rank that needs most, its process included; ``stages``: the bytes of the stages."""
        most = max(rank_bytes(self._programs(self._images(plan)), plan, stages))
        return self._request.held_bytes + int((self._error_factor if plan.spill is None else SPILLING_OFF) * most)

    def counted(self, plan_bytes: int) -> int:
        """Return ``plan_bytes``; remember it if it is the least of all plans that do not fit."""
        if plan_bytes > self._request.memory_bytes:
            self._smallest = min(plan_bytes, self._smallest or plan_bytes)
        return plan_bytes

    def _with_other_cuts(self, plan: ParallelPlan) -> Iterator[ParallelPlan]:
        """Yield the plan with the fastest cuts that fit, and with cuts beside these; nothing if none fit."""
        if plan.stages == 1:
            return
        key = self._images(plan), plan.grids, plan.schedule, plan.microbatches, plan.recompute
        if key not in self._chosen:
            room = self._request.memory_bytes - self._request.held_bytes
            search = FittingCuts(self._anywhere(plan), self._seconds(plan), room)
            cuts, plan_bytes = search.fastest()
            self.counted(self._request.held_bytes + plan_bytes)
            self._chosen[key] = () if cuts is None else (cuts, *search.beside())
        for cuts in self._chosen[key]:
            yield replace(plan, cuts=cuts)

    def _anywhere(self, plan: ParallelPlan) -> StagesAnywhere:
        return StagesAnywhere.of(plan, self._programs(self._images(plan)), self._table(plan), self._error_factor)

    def _seconds(self, plan: ParallelPlan) -> tuple[SecondsTable, ...]:
        """Return, for each stage, the seconds from any place to any other, with messages, forward and backward."""
        table = self._table(plan)
        # What is received at a place is sent by the stage that ends there; cotangents come back.
        travels_s = 2 * np.asarray(table.maps.taken)[:, -1] / self._request.machine.node.bytes_per_s
        travels_s[[0, -1]] = 0.0  # nothing is sent after the last stage
        each = zip(map(np.asarray, self._bounds.before(plan, table.places)), plan.grids, strict=True)
        # ``times`` are cumulative: a stage takes the time at its end (column) minus that at its beginning (row).
        return tuple(times - times[:, None] + travels_s / prod(grid) for times, grid in each)

    def _table(self, plan: ParallelPlan) -> StageTable:
        images = self._images(plan)
        if images not in self._tables:
            self._tables[images] = StageTable.of(self._programs(images))
        return self._tables[images]

    def _images(self, plan: ParallelPlan) -> int:
        return self._request.batch // plan.replicas // plan.microbatches
