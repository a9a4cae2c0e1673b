"""Choice of the number of cells: as few as memory allows, because every cell's halo costs time."""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells.budget import free_bytes, least_bytes
from hyfi_core.cost.memory import forecast_memory
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan

SIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows (and columns) of cells to try."""
_BORDERS = 1.25  # factor for halos and unequal parts
_ROOM = 2  # times the minimum, so that a cell is read while another is computed
_OFF = 1.15  # error of the forecast of a step without cells


def with_cells(plan: ParallelPlan, program: Program, held_bytes: int, device: torch.device) -> ParallelPlan:
    """Return the plan with ``cells="auto"`` resolved; without cells and spilling if everything fits in memory.

    Args:
        plan: with named cuts.
        program: the captured model, of one micro-batch.
        held_bytes: what the rank uses before the first step.
        device: of the maps.

    Raises:
        RequestError: the memory is too small for any number of cells; the message says how much is needed.
    """
    if plan.cells != "auto":
        return plan
    memory_bytes = plan.memory_bytes or free_bytes(device) // 2
    whole = replace(plan, cells=None, spill=None)
    forecasts = forecast_memory(program, whole)
    if held_bytes + _OFF * max(stage.total_bytes for stage in forecasts) <= memory_bytes:
        return whole
    held_bytes += max(stage.state_bytes for stage in forecasts)
    working = max(stage.working_bytes for stage in forecasts)
    needed = {side: least_bytes(held_bytes, int(_BORDERS * working / side**2)) for side in SIDES}
    for room in (_ROOM, 1):
        for side, least in needed.items():
            if held_bytes + room * (least - held_bytes) <= memory_bytes:
                return replace(plan, cells=(side, side))
    raise RequestError(
        f"plan.memory_bytes is {memory_bytes:,}, but even {SIDES[-1]} x {SIDES[-1]} cells need at least "
        f"{needed[SIDES[-1]]:,}, {held_bytes:,} of it for libraries, weights and optimizer state; raise "
        f"plan.memory_bytes, or use smaller images"
    )
