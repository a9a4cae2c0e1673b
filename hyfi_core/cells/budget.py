"""Memory budget of cells: their number, the part of a rank's memory left for feature maps, and what is spilled.

::

    memory limit  libraries, weights, gradients, optimizer state, records │ pages of maps │ workspace of largest step
    store         maps that are kept and do not fit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells.fused_memory import CellCosts
from hyfi_core.cells.page_forecast import PagedForecast
from hyfi_core.cost.memory.forecast import (
    BORDERS,
    FORECAST_OFF,
    LIBRARY_BYTES,
    PAGES_FACTOR,
    RECORD_BYTES,
    WEIGHT_COPIES,
    WORKSPACE_FACTOR,
    forecast_memory,
    rank_peaks,
)
from hyfi_core.errors import MemoryLimitError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import available_bytes, resident_bytes, return_freed_now

EARLY = 0.75
"""Fraction of a pager's limit above which pages are written early, so that they can be dropped at once."""
_ONLY_IN_MEMORY = {True: 0.41, False: 0.2}
"""Whether there is backward -> kept maps that never go to the store, as a fraction of (limit - largest step).
Recomputed maps are not counted. Measured with backward, ResNet-18: 0.39 to 0.60."""
_EVALUATION_OFF = 1.15
"""An evaluation's real peak is at most this many times the forecast."""
OF_FREE_MEMORY = 0.5
"""Fraction of the free memory that is used for pages if no limit is given."""

SIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows (and columns) of cells to try."""
_ROOM = 2
"""How many times the least memory for maps cells should have, so that one is read while another is computed."""
_GROWN_BYTES = 16 << 20
"""Freed memory is returned to the system, which takes milliseconds, once the rest of the process has grown by this."""


def with_cells(
    plan: ParallelPlan,
    program: Program,
    held_bytes: int,
    device: torch.device,
    trains: bool = True,
    costs: CellCosts | None = None,
    fewest: int = 1,
) -> ParallelPlan:
    """Return the plan with ``cells="auto"`` resolved; without cells and spilling if everything fits in memory.

    Args:
        plan: with named cuts.
        program: the captured model, of one micro-batch.
        held_bytes: bytes of the device's memory that the rank uses before the first step; see ``held_bytes_on``.
        device: device of the maps.
        trains: whether there is backward; in evaluation mode a rank keeps far less.
        costs: costs of the program without backward, from earlier calls; None: none are known.
        fewest: least number of rows, and of columns, of cells; see ``cells.large_maps``.

    Raises:
        MemoryLimitError: the memory is too small for any number of cells; the message says how much is needed.
    """
    if plan.cells != "auto":
        return plan
    memory_bytes = plan.memory_bytes or free_bytes(device) // 2
    undivided = replace(plan, cells=None, spill=None)
    forecasts = forecast_memory(program, undivided)
    weights, costs = max(forecast.largest_weight_bytes for forecast in forecasts), costs or CellCosts(program)
    # In each case: the peak without cells, the optimizer's state, and, for each number of rows of cells to try, the
    # bytes of the largest step of a cell.
    if trains:
        peak, state = max(rank_peaks(undivided, forecasts)), max(forecast.state_bytes for forecast in forecasts)
        maps = max(forecast.working_bytes for forecast in forecasts)
        steps = ((side, int(BORDERS * maps / side**2)) for side in SIDES)
    else:
        (rows, columns), state = plan.grids[0], 0
        peak = int(costs.of((1, 1)).peak_bytes) // (rows * columns)
        steps = ((side, int(costs.of((rows * side, columns * side)).step_bytes)) for side in SIDES if side > 1)
    fewest = min(fewest, SIDES[-1])
    if held_bytes + (FORECAST_OFF[device.type] if trains else _EVALUATION_OFF) * peak <= memory_bytes:
        return undivided if fewest == 1 else replace(undivided, cells=(fewest, fewest))
    held_bytes += state
    records = len(program.operators) * RECORD_BYTES[trains]
    least_of: dict[int, int] = {}  # rows of cells -> the least memory with which they work
    for side, step_bytes in steps:  # a generator: costs of more cells than needed would take long
        if side < fewest:
            continue
        besides_maps, least = _of_cells(held_bytes, side, step_bytes, weights, records)
        least_of[side] = least
        # The fewest cells that have room to read ahead.
        if besides_maps + _ROOM * (least - besides_maps) <= memory_bytes:
            return replace(plan, cells=(side, side))
    for side, least in least_of.items():  # without room to read ahead: slower, but it works
        if least <= memory_bytes:
            return replace(plan, cells=(side, side))
    raise _too_little(memory_bytes, min(least_of.values()), held_bytes)


def _too_little(memory_bytes: int, least_bytes: int, held_bytes: int) -> MemoryLimitError:
    """Return the error for a limit with which no number of cells works."""
    return MemoryLimitError(
        f"plan.memory_bytes is {memory_bytes:,}, but with any number of cells a rank needs at least "
        f"{least_bytes:,} bytes, {held_bytes:,} of them for libraries, weights and optimizer state; raise "
        f"plan.memory_bytes (or --memory), or use smaller images",
        least_bytes,
    )


def _of_cells(held_bytes: int, side: int, maps_bytes: int, weights_bytes: int, records_bytes: int) -> tuple[int, int]:
    """Return (bytes besides maps, least bytes in all) of a rank with ``side`` rows and columns of cells."""
    always_bytes = held_bytes + LIBRARY_BYTES + side**2 * records_bytes
    return always_bytes, least_bytes(always_bytes, PagedForecast(maps_bytes, 0, 0, weights_bytes))


def evaluation_bytes(costs: CellCosts, grid: tuple[int, int], cells: tuple[int, int], held_bytes: int) -> int:
    """Return the largest memory of a rank that evaluates its part of an image, in cells and without spilling.

    Args:
        costs: costs of the program in evaluation mode.
        grid: (rows, columns) of the ranks that share the image.
        cells: (rows, columns) of cells of each rank's part; (1, 1): none.
        held_bytes: what the rank uses before the first step.
    """
    ranks = prod(grid)
    if prod(cells) == 1:
        return held_bytes + int(_EVALUATION_OFF * costs.of((1, 1)).peak_bytes / ranks)
    cost = costs.of((grid[0] * cells[0], grid[1] * cells[1]))
    # A rank keeps the maps that it needs at a time of its whole part, and computes in the workspace of one cell.
    records = len(costs.program.operators) * RECORD_BYTES[False]
    fixed_bytes = held_bytes + LIBRARY_BYTES + prod(cells) * records
    return fixed_bytes + int(
        _EVALUATION_OFF * max(cost.peak_bytes / ranks, cost.step_bytes) + WORKSPACE_FACTOR * cost.step_bytes
    )


def page_limit(
    memory_bytes: int | None, held_bytes: int, forecasts: Sequence[PagedForecast], device: torch.device
) -> int:
    """Return the largest number of bytes of maps that a pager may hold.

    Args:
        memory_bytes: memory limit of the rank; None: half of the memory that is free now.
        held_bytes: what it always needs: interpreter, libraries, weights, gradients, optimizer state.
        forecasts: forecasts of all stages in all cells.
        device: where the maps are.

    Raises:
        MemoryLimitError: the limit is too small for one step; the message says how much is needed.
    """
    if memory_bytes is None:
        return int(OF_FREE_MEMORY * free_bytes(device))
    largest = largest_step(forecasts)
    records = LIBRARY_BYTES + sum(forecast.stays_bytes for forecast in forecasts)
    least = least_bytes(held_bytes + records, largest)
    if memory_bytes < least:
        raise MemoryLimitError(
            f"plan.memory_bytes is {memory_bytes:,}, but with these cells a rank needs at least {least:,}: "
            f"{held_bytes:,} for libraries, weights and optimizer state, {records:,} for what cells keep, "
            f"{least - held_bytes - records:,} for the largest step of a cell; raise plan.memory_bytes (or "
            f"--memory), or use another number of cells (plan.cells, or --cells)",
            least,
        )
    return memory_bytes - held_bytes - records - workspace_bytes(largest)


def resident_limit(
    memory_bytes: int | None, forecasts: Sequence[PagedForecast], device: torch.device
) -> ResidentLimit | None:
    """Return the limit of the process's resident memory between two steps, None if it is not to be measured.

    Args:
        memory_bytes: memory limit of the rank, or None.
        forecasts: forecasts of all stages in all cells.
        device: where the maps are; on a GPU they are not resident memory.
    """
    if memory_bytes is None or device.type != "cpu":
        return None
    largest = largest_step(forecasts)
    # The process is measured between two steps, so the workspace of the next step must still fit.
    most_bytes = memory_bytes - workspace_bytes(largest)
    return ResidentLimit(most_bytes, least_bytes=PAGES_FACTOR * largest.working_bytes)


def largest_step(forecasts: Sequence[PagedForecast]) -> PagedForecast:
    """Return the largest needs of a step in any of the forecasts."""
    working = max(forecast.working_bytes for forecast in forecasts)
    weights = max(forecast.weights_bytes for forecast in forecasts)
    return PagedForecast(working, kept_bytes=0, weights_bytes=weights)


def workspace_bytes(largest: PagedForecast) -> int:
    """Return the bytes that the largest step needs besides pages."""
    return WORKSPACE_FACTOR * largest.working_bytes + WEIGHT_COPIES * largest.weights_bytes


def least_bytes(held_bytes: int, largest: PagedForecast) -> int:
    """Return the smallest memory limit with which a rank can train; see ``page_limit``."""
    return held_bytes + PAGES_FACTOR * largest.working_bytes + workspace_bytes(largest)


def spilled_bytes(kept_bytes: int, limit_bytes: int, working_bytes: int = 0, trains: bool = False) -> int:
    """Return how many bytes of kept maps will be written to the store: those that do not stay in memory all the time.

    A measured fraction of the memory that the largest step leaves holds maps that are never written.

    Args:
        kept_bytes: bytes of kept maps; see ``PagedForecast``.
        limit_bytes: limit of maps in memory.
        working_bytes: bytes of the largest step of a cell.
        trains: whether there is backward.
    """
    return max(0, kept_bytes - int(_ONLY_IN_MEMORY[trains] * max(0, limit_bytes - working_bytes)))


def held_bytes_on(device: torch.device) -> int:
    """Return the bytes of the device's memory that this process uses; on a CPU, libraries included."""
    # Not the bytes that the allocator has reserved in addition, from which the next tensors are taken.
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device that has the maps."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


@dataclass
class ResidentLimit:
    """Computes how many bytes of pages fit into a process whose resident memory is limited.

    Besides pages, the process holds libraries, weights, gradients, small maps, messages, buffers of files, and what
    allocators and libraries of matrix products keep for each thread, and so for each cell.

    Attributes:
        most_bytes: largest resident memory of the process between two steps.
        least_bytes: least bytes of pages: with fewer, no step could run.
        besides_bytes: resident memory besides pages after freed memory was last returned to the system.
    """

    most_bytes: int
    least_bytes: int
    besides_bytes: int = 0

    def pages(self, limit_bytes: int, paged_bytes: int) -> int:
        """Return how many bytes of pages may be in memory: what the rest of the process leaves, or ``least_bytes``.

        If there is too little room, freed memory that the process still holds is returned to the system first.

        Args:
            limit_bytes: upper bound of the result.
            paged_bytes: bytes of the pages that are in memory now.
        """
        besides_bytes = resident_bytes() - paged_bytes
        # Only if it has grown since the last time, because returning memory takes time.
        has_grown = besides_bytes > self.besides_bytes + _GROWN_BYTES
        if self.most_bytes - besides_bytes < limit_bytes and has_grown:
            return_freed_now()
            self.besides_bytes = besides_bytes = resident_bytes() - paged_bytes
        return min(limit_bytes, max(self.least_bytes, self.most_bytes - besides_bytes))
