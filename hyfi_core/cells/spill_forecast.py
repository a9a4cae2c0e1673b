"""Forecast of what a plan in cells spills, before any rank exists, by the rule with which a run reserves its store.

    limit    process, weights, gradients, moments, records │ pages of maps │ workspace    ``budget.page_limit``
    kept     maps of all cells that backward needs: those of a cell in the middle, times their number
    moved    kept maps that find no room among the pages: out of memory in forward, back in backward
             inputs of a step that find none, in all cells: read again when all have computed the step's first half

A step computes in two halves where cells wait for each other, for halos and sums. Steps of ResNets at 512 and 1024 px
moved 0.7 to 1.4 times as much as forecast; without what is read again it would be 0.85 to 3.2 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells.budget import EARLY, OF_FREE_MEMORY, largest_step, page_limit, spilled_bytes
from hyfi_core.cells.halo import for_training
from hyfi_core.cells.page_forecast import PagedForecast, forecast_pages
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.memory.forecast import forecast_memory
from hyfi_core.cost.step.lowered_stages import LoweredPlans, lowered_stages, middle_rank
from hyfi_core.cost.step.spilling import SpilledMaps
from hyfi_core.lowering.segments import build_tape
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.in_flight import microbatches_in_flight

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class SpillForecast:
    """Forecasts what plans spill on a machine; a ``SpillRule``.

    Attributes:
        machine: the machine model.
        held_bytes: bytes of ``plan.memory_bytes`` that a rank uses before it has weights.
        pixels: dtype of the pixels from which images are computed; None: images are kept.
        pages_bytes: limit of maps in memory; None: as ``plan.memory_bytes`` allows or, without it, half of the memory.
    """

    machine: MachineModel
    held_bytes: int = 0
    pixels: torch.dtype | None = torch.uint8
    pages_bytes: int | None = None

    def __call__(self, program: Program, plan: ParallelPlan, lowered_plans: LoweredPlans) -> tuple[SpilledMaps, ...]:
        """Return what each stage spills in a step.

        Args:
            program: the captured model, of one micro-batch.
            plan: with named cuts and with cells.
            lowered_plans: lowered plans, as for ``StageCosts``.

        Raises:
            MemoryLimitError: the memory is too small for one step of a cell; the message says how much is needed.
        """
        assert plan.spill is not None
        placement = Placement.of(plan)
        stages = self._stages(program, plan, lowered_plans, placement.stages)
        # Bytes of weights, gradients and optimizer state, for each stage.
        states = [forecast.state_bytes for forecast in forecast_memory(program, replace(plan, cells=None, spill=None))]
        in_flight = max(microbatches_in_flight(plan, stage) for stage in range(plan.stages))
        cells = prod(plan.cell_grid or (1, 1))
        spilled = [SpilledMaps(0.0, 0.0)] * len(stages)
        for hosted in {placement.hosted(rank) for rank in range(placement.size)}:
            numbers = [stage for stage, _ in hosted]
            pages = [stages[number].times(in_flight) for number in numbers]
            limit = self._limit(plan, pages, sum(states[number] for number in numbers))
            for number in numbers:
                # With two directions, a stage is on two ranks, each with another second stage: the rank that moves most
                # counts.
                maps = _spilled(stages[number], pages, limit, cells)
                spilled[number] = max(
                    maps, spilled[number], key=lambda spill: spill.forward_bytes + spill.backward_bytes
                )
        return tuple(spilled)

    def _stages(
        self, program: Program, plan: ParallelPlan, lowered_plans: LoweredPlans, count: int
    ) -> tuple[PagedForecast, ...]:
        """Return the needs of a rank of each stage, for all of its cells and one micro-batch."""
        fine, cells = plan.by_cells(), prod(plan.cell_grid or (1, 1))
        lowered = lowered_stages(program, plan, fine, self.machine, lowered_plans)
        forecasts = []
        for index in range(count):
            piece, divided, _ = lowered.stage(index)
            ranked = divided.planes[0]
            ranked = replace(ranked, instructions=tuple(map(for_training, ranked.instructions)))
            entering = {name for names in piece.entries.values() for name in names}
            tape = build_tape(ranked, {*program.parameters, *entering} & lowered.active)
            # A cell in the middle has halos on all sides, and so the largest maps.
            middle = middle_rank(fine.grids[index % len(fine.grids)])
            forecast = forecast_pages(ranked, tape, middle, trains=True, pixels=self.pixels)
            forecasts.append(forecast.times(cells))
        return tuple(forecasts)

    def _limit(self, plan: ParallelPlan, pages: Sequence[PagedForecast], state_bytes: int) -> int:
        """Return the bytes of maps that a rank may have in memory."""
        if self.pages_bytes is not None:
            return self.pages_bytes
        if plan.memory_bytes is None:
            return int(OF_FREE_MEMORY * self.machine.memory_bytes)
        return page_limit(plan.memory_bytes, self.held_bytes + state_bytes, pages, _HOST)


def _spilled(stage: PagedForecast, pages: Sequence[PagedForecast], limit_bytes: int, cells: int) -> SpilledMaps:
    """Return the bytes that a stage spills in forward and in backward.

    Args:
        stage: the stage's needs for one micro-batch: kept bytes of all cells; ``working_bytes`` and ``waits`` of one.
        pages: likewise, for all stages of its rank and all micro-batches in flight.
        limit_bytes: limit of maps in memory.
        cells: number of cells of a rank.
    """
    kept_bytes, working = sum(page.kept_bytes for page in pages), largest_step(pages).working_bytes
    # Of the bytes that its rank spills, a stage has the same fraction as of the kept bytes.
    stored = stage.kept_bytes * spilled_bytes(kept_bytes, limit_bytes, working, trains=True) / max(1, kept_bytes)
    # Room for maps beside the largest step, below the fraction of the limit above which a pager writes pages early.
    room = max(0.0, EARLY * limit_bytes - working)
    forward_again = backward_again = 0.0  # moved because cells wait for each other
    for inputs, cotangents in stage.waits:
        # All cells reach the wait before the first goes on: the inputs of all are there, or have to be read again.
        forward_again += max(0.0, cells * inputs - room)
        if cotangents:  # inputs are read, and cotangents are written and read
            moved_bytes = inputs + cotangents
            backward_again += max(0.0, cells * moved_bytes - room) * (1 + cotangents / moved_bytes)
    return SpilledMaps(stored + forward_again, stored + backward_again, stage.recomputed)
