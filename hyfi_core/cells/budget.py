"""Memory budget of cells: their number, the part of a rank's memory left for feature maps, and what is spilled.

memory limit    libraries, weights, gradients, optimizer state, records │ pages of maps │ workspace of the largest step
store           maps that are kept and do not fit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells.fused_memory import runs_for_cells
from hyfi_core.cells.recipe import DEEPEST, cheap_calls, is_cheap
from hyfi_core.cells.resident import ResidentLimit
from hyfi_core.cells.spill_store import blocks_bytes
from hyfi_core.cost.memory import (
    BORDERS,
    FORECAST_OFF,
    LIBRARY_BYTES,
    PAGES,
    STEP_BYTES,
    WEIGHT_COPIES,
    WORKSPACE,
    forecast_memory,
)
from hyfi_core.errors import MemoryLimitError
from hyfi_core.lowering.segments import OperatorStep, Step, Tape, made_by, taken_by
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.max_pool import MaxPool
from hyfi_core.ops.relu import Relu
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import available_bytes
from hyfi_core.rules.instructions import CollectiveCall, RankProgram

EARLY = 0.75
"""Fraction of a pager's limit above which pages are written early, so that they can be dropped at once."""
_ONLY_IN_MEMORY = 0.2
"""Of the limit: maps that are not in the store at the peak, except recomputed ones; measured 0 to 0.35."""
_OF_FREE_MEMORY = 0.5  # used for pages, if no limit is given
SMALLEST_BYTES = 1 << 16
"""Smaller maps stay in memory: small reads and writes are slow."""

SIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows (and columns) of cells to try."""
_ROOM = 2  # times the minimum, so that a cell is read while another is computed


def with_cells(
    plan: ParallelPlan, program: Program, held_bytes: int, device: torch.device, trains: bool = True
) -> ParallelPlan:
    """Return the plan with ``cells="auto"`` resolved; without cells and spilling if everything fits in memory.

    Args:
        plan: with named cuts.
        program: the captured model, of one micro-batch.
        held_bytes: what the rank uses before the first step.
        device: of the maps.
        trains: whether there is backward; in evaluation mode a rank keeps far less.

    Raises:
        MemoryLimitError: the memory is too small for any number of cells; the message says how much is needed.
    """
    if plan.cells != "auto":
        return plan
    memory_bytes = plan.memory_bytes or free_bytes(device) // 2
    whole = replace(plan, cells=None, spill=None)
    forecasts = forecast_memory(program, whole)
    weights = max(one.largest_weight_bytes for one in forecasts)
    if trains:
        peak, state = (max(getattr(one, name) for one in forecasts) for name in ("total_bytes", "state_bytes"))
        maps = max(one.working_bytes for one in forecasts)
        steps = {side: int(BORDERS * maps / side**2) for side in SIDES}
    else:
        state, (rows, columns) = 0, plan.grids[0]
        peak = int(runs_for_cells(program, (1, 1))[1].peak_bytes) // (rows * columns)
        steps = {n: int(runs_for_cells(program, (rows * n, columns * n))[1].step_bytes) for n in SIDES if n > 1}
    if held_bytes + FORECAST_OFF * peak <= memory_bytes:
        return whole
    held_bytes += state
    records = len(program.operators) * STEP_BYTES[trains]
    needed = {side: _of_cells(held_bytes, side, of, weights, records) for side, of in steps.items()}
    for room in (_ROOM, 1):
        for side, (held, least) in needed.items():
            if held + room * (least - held) <= memory_bytes:
                return replace(plan, cells=(side, side))
    smallest = min(least for _, least in needed.values())
    raise MemoryLimitError(
        f"plan.memory_bytes is {memory_bytes:,}, but with any number of cells a rank needs at least "
        f"{smallest:,} bytes, {held_bytes:,} of them for libraries, weights and optimizer state; raise "
        f"plan.memory_bytes (or --memory), or use smaller images",
        smallest,
    )


def _of_cells(held_bytes: int, side: int, maps_bytes: int, weights_bytes: int, records_bytes: int) -> tuple[int, int]:
    """Return (what a rank always needs, the least it needs) with so many rows and columns of cells."""
    held = held_bytes + LIBRARY_BYTES + side**2 * records_bytes
    return held, least_bytes(held, PagedForecast(maps_bytes, 0, 0, weights_bytes))


def evaluation_bytes(program: Program, grid: tuple[int, int], cells: tuple[int, int], held_bytes: int) -> int:
    """Return the memory of a rank that evaluates its part of a map, in cells and without spilling.

    Args:
        program: in evaluation mode.
        grid: of the ranks that share the image.
        cells: of each rank's part; (1, 1) for none.
        held_bytes: what the rank uses before the first step.
    """
    ranks = prod(grid)
    if prod(cells) == 1:
        return held_bytes + int(FORECAST_OFF * runs_for_cells(program, (1, 1))[1].peak_bytes / ranks)
    cost = runs_for_cells(program, (grid[0] * cells[0], grid[1] * cells[1]))[1]
    records = len(program.operators) * STEP_BYTES[False]
    held = held_bytes + LIBRARY_BYTES + prod(cells) * records
    return held + int(FORECAST_OFF * max(cost.peak_bytes / ranks, cost.step_bytes) + WORKSPACE * cost.step_bytes)


def page_limit(
    memory_bytes: int | None, held_bytes: int, forecasts: Sequence[PagedForecast], device: torch.device
) -> int:
    """Return the largest number of bytes of maps that a pager may hold.

    Args:
        memory_bytes: memory limit of the rank; None: half of the memory that is free now.
        held_bytes: what it always needs: interpreter, libraries, weights, gradients, optimizer state.
        forecasts: of all stages in all cells.
        device: where the maps are.

    Raises:
        MemoryLimitError: the limit is too small for one step; the message says how much is needed.
    """
    if memory_bytes is None:
        return int(_OF_FREE_MEMORY * free_bytes(device))
    largest = largest_step(forecasts)
    records = LIBRARY_BYTES + sum(one.stays_bytes for one in forecasts)
    least = least_bytes(held_bytes + records, largest)
    if memory_bytes < least:
        raise MemoryLimitError(
            f"plan.memory_bytes is {memory_bytes:,}, but with these cells a rank needs at least {least:,}: "
            f"{held_bytes:,} for libraries, weights and optimizer state, {records:,} for what cells keep, "
            f"{least - held_bytes - records:,} for the largest step of a cell; raise plan.memory_bytes (or "
            f"--memory), or use another number of cells (plan.cells, or --cells)"
        )
    return memory_bytes - held_bytes - records - workspace_bytes(largest)


def resident_limit(
    memory_bytes: int | None, forecasts: Sequence[PagedForecast], device: torch.device
) -> ResidentLimit | None:
    """Return the limit of the process's resident memory between two steps, None if it is not to be measured.

    Args:
        memory_bytes: memory limit of the rank, or None.
        forecasts: of all stages in all cells.
        device: where the maps are; on a GPU they are not resident memory.
    """
    if memory_bytes is None or device.type != "cpu":
        return None
    largest = largest_step(forecasts)
    return ResidentLimit(memory_bytes - workspace_bytes(largest), PAGES * largest.working_bytes)


def largest_step(forecasts: Sequence[PagedForecast]) -> PagedForecast:
    """Return the largest needs of a step in any of the forecasts."""
    working, weights = (max(getattr(one, n) for one in forecasts) for n in ("working_bytes", "weights_bytes"))
    return PagedForecast(working, 0, 0, weights)


def workspace_bytes(largest: PagedForecast) -> int:
    """Return what the largest step needs besides pages."""
    return WORKSPACE * largest.working_bytes + WEIGHT_COPIES * largest.weights_bytes


def least_bytes(held_bytes: int, largest: PagedForecast) -> int:
    """Return the smallest memory limit with which a rank can train; see ``page_limit``."""
    return held_bytes + PAGES * largest.working_bytes + workspace_bytes(largest)


def stored_bytes(size: int) -> int:
    """Return how many bytes of a store a map takes; a small one is not stored."""
    return blocks_bytes(size) if size >= SMALLEST_BYTES else size


def spilled_bytes(kept_bytes: int, limit_bytes: int) -> int:
    """Return how many of the kept bytes are spilled."""
    return max(0, kept_bytes - int(_ONLY_IN_MEMORY * limit_bytes))


@dataclass(frozen=True)
class PagedForecast:
    """What a cell needs for a stage and a micro-batch.

    Attributes:
        working_bytes: inputs and outputs of its largest step, without weights.
        kept_bytes: peak of what it keeps while cells wait for each other, in memory or spilled, without recomputed
            maps.
        stays_bytes: what it keeps and cannot spill: small maps, and records of its steps.
        weights_bytes: weights of the step that has most of them.
    """

    working_bytes: int
    kept_bytes: int
    stays_bytes: int = 0
    weights_bytes: int = 0


def forecast_pages(
    ranked: RankProgram, tape: Tape, position: int, dtypes: Mapping[str, torch.dtype], trains: bool
) -> PagedForecast:
    """Return what a cell needs for a stage.

    Args:
        ranked: the cell's program.
        tape: its steps.
        position: of the cell in the stage's grid.
        dtypes: types of values under autocast.
        trains: whether backward follows.
    """
    sizes = _Sizes(ranked, position, dtypes)
    working = max((sum(map(sizes.of, {*taken_by(s), *made_by(s)})) for s in tape.steps), default=0)
    weights = max((sum(map(sizes.of_weight, taken_by(s))) for s in tape.steps), default=0)
    kept = [*map(sizes.of, _kept(tape, sizes)), *map(sizes.saved_besides, tape.steps)] if trains else []
    small = sum(size for size in kept if size < SMALLEST_BYTES)
    return PagedForecast(working, _peak(tape, sizes, trains), len(tape.steps) * STEP_BYTES[trains] + small, weights)


class _Sizes:
    """Bytes of a cell's parts; weights and values such as sums over whole maps are not counted."""

    def __init__(self, ranked: RankProgram, position: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self.ranked, self._position, self._dtypes = ranked, position, dtypes
        self._fixed = {*ranked.program.parameters, *ranked.program.buffers, *ranked.program.constants}

    def of(self, name: str) -> int:
        """Return the bytes of a value."""
        if name in self._fixed or not (name in self.ranked.splits or name in self.ranked.program.values):
            return 0
        dtype = self._dtypes.get(name.split("~")[0], self.ranked.values[name].dtype)
        return self.values(name) * dtype.itemsize

    def of_weight(self, name: str) -> int:
        """Return the bytes of a parameter, 0 for other values."""
        if name not in self.ranked.program.parameters:
            return 0
        return prod(self.ranked.values[name].shape) * self.ranked.values[name].dtype.itemsize

    def values(self, name: str) -> int:
        """Return how many values it has."""
        shape, split = self.ranked.values[name].shape, self.ranked.splits.get(name)
        return prod(shape if split is None else split.local_shape(shape, self._position))

    def saved_besides(self, step: Step) -> int:
        """Return the bytes that an operator saves besides program values: strips, canvases, indices of maxima."""
        if not isinstance(step, OperatorStep):
            return 0
        operator = step.call.operator
        if isinstance(operator, MaxPool):
            return sum(map(self.values, made_by(step)))
        if not isinstance(operator, Convolution) or operator.halo.transfer.have.empty:
            return 0
        transfer = operator.halo.transfer
        pixels = transfer.received_px if operator.own is not None else 0 if transfer.idle else transfer.need.area
        return self.of(str(step.call.inputs[0])) * pixels // transfer.have.area


def _peak(tape: Tape, sizes: _Sizes, trains: bool) -> int:
    """Return the peak of kept bytes: values used after a wait and, in training, what backward needs.

    saved          values kept for backward: they grow through the forward and are all there at its end
    passing        in evaluation, values between the step that computes them and their last use
    cotangents     in backward, the same for cotangents, whose steps run in reverse
    """
    maker: dict[str, int] = {}
    last: dict[str, int] = {}
    image = sizes.ranked.program.image
    if image in sizes.ranked.splits:
        maker[image] = -1
    for at, step in enumerate(tape.steps):
        last.update((name, at) for name in taken_by(step))
        maker.update((name, at) for name in made_by(step))
    kept = _kept(tape, sizes) if trains else set()
    waits = [
        at for at, s in enumerate(tape.steps) if isinstance(s, OperatorStep) and isinstance(s.call, CollectiveCall)
    ]
    # Changes at each step; their running sums are the bytes alive.
    saved, passing, cotangents = ([0] * (len(tape.steps) + 2) for _ in range(3))
    for name, at in maker.items():
        size, end = stored_bytes(sizes.of(name)), last.get(name, at)
        if name in kept:
            saved[at + 1] += size
        elif not trains:
            passing[at + 1] += size
            passing[end + 1] -= size
        if trains and name in tape.active:
            cotangents[at + 1] += size
            cotangents[end + 1] -= size
    for at, step in enumerate(tape.steps) if trains else ():
        saved[at + 1] += stored_bytes(sizes.saved_besides(step))
    saved, passing, cotangents = (list(accumulate(changes)) for changes in (saved, passing, cotangents))
    end = saved[-1]
    return max([end, *(saved[at] + passing[at] + cotangents[at] for at in waits)])


def _kept(tape: Tape, sizes: _Sizes) -> set[str]:
    """Return the values that are kept for backward and not recomputed; see ``cells.recipe``.

    A cheap value is recomputed from others, some of them recomputed, too. Its depth is the length of this chain of
    recipes, 0 for a kept value; a value that would be deeper than ``DEEPEST`` is kept.
    """
    image = sizes.ranked.program.image
    kept = {image} if image in sizes.ranked.splits else set()
    depth = dict.fromkeys(kept, 0)
    for step in tape.steps:
        sources = [depth[name] for name in taken_by(step) if name in depth and sizes.of(name)]
        operator = step.call.operator if isinstance(step, OperatorStep) else None
        in_place = isinstance(operator, Relu) and operator.overwrites_input
        for name in made_by(step):
            if isinstance(step, OperatorStep):
                cheap = name == made_by(step)[0] and is_cheap(step.call, lambda n: sizes.ranked.values[n].shape)
            else:
                cheap = cheap_calls(step, name, lambda n: sizes.ranked.values[n].shape) is not None
            depth[name] = max(sources, default=DEEPEST) + (not in_place) if cheap else 0
            if depth[name] > DEEPEST or not cheap:
                kept.add(name)
                depth[name] = 0
    return kept


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device that has the maps."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
