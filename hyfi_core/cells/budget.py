"""Memory budget of cells: their number, and the part of a rank's memory limit that is left for feature maps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells.recipe import cheap_calls
from hyfi_core.cost.memory import FORECAST_OFF, forecast_memory
from hyfi_core.errors import RequestError
from hyfi_core.lowering.segments import OperatorStep, Tape, made_by, taken_by
from hyfi_core.ops.base import Recomputable
from hyfi_core.ops.max_pool import MaxPool
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import available_bytes
from hyfi_core.rules.instructions import RankProgram

_SHARE = 0.5
_PAGES = 2  # times the inputs and outputs of the largest step: its pages, and those being transferred
_BESIDE = 3  # times the same: workspace of operators (kernels reorder maps), messages, allocators

SIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows (and columns) of cells to try."""
_BORDERS = 1.25  # factor for halos and unequal parts
_ROOM = 2  # times the minimum, so that a cell is read while another is computed


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
    if held_bytes + FORECAST_OFF * max(stage.total_bytes for stage in forecasts) <= memory_bytes:
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


def page_limit(memory_bytes: int | None, held_bytes: int, working_bytes: int, device: torch.device) -> int:
    """Return the largest number of bytes of maps that a pager may hold.

    Args:
        memory_bytes: memory limit of the rank; None: half of the memory that is free now.
        held_bytes: what it always needs: interpreter, libraries, weights, gradients, optimizer state.
        working_bytes: what the largest step of a cell needs in addition to its pages.
        device: where the maps are.

    Raises:
        RequestError: the limit is too small for one step; the message says how much is needed.
    """
    if memory_bytes is None:
        return int(_SHARE * free_bytes(device))
    least = least_bytes(held_bytes, working_bytes)
    if memory_bytes < least:
        raise RequestError(
            f"plan.memory_bytes is {memory_bytes:,}, but with these cells a rank needs at least {least:,}: "
            f"{held_bytes:,} for libraries, weights and optimizer state, {least - held_bytes:,} for the largest step "
            f"of a cell; raise plan.memory_bytes, or use more cells (plan.cells)"
        )
    return memory_bytes - held_bytes - _BESIDE * working_bytes


def least_bytes(held_bytes: int, working_bytes: int) -> int:
    """Return the smallest memory limit with which a rank can train; see ``page_limit``."""
    return held_bytes + (_PAGES + _BESIDE) * working_bytes


def working_bytes(ranked: RankProgram, tape: Tape, position: int) -> int:
    """Return the bytes of inputs and outputs of the largest step of a cell, without weights."""
    fixed = {*ranked.program.parameters, *ranked.program.buffers, *ranked.program.constants}
    return max((_bytes(ranked, {*taken_by(s), *made_by(s)} - fixed, position) for s in tape.steps), default=0)


def kept_bytes(ranked: RankProgram, tape: Tape, position: int) -> int:
    """Return an upper bound of what a cell keeps of a micro-batch for backward, in memory or spilled.

    Recomputed values are not counted, and cotangents only for one step: as they are computed, kept values are freed.
    """
    kept = {ranked.program.image} & set(ranked.splits)
    places = 0
    for step in tape.steps:
        if isinstance(step, OperatorStep):
            if isinstance(step.call.operator, Recomputable):
                continue
            if isinstance(step.call.operator, MaxPool):
                places += 4 * sum(_elements(ranked, name, position) for name in made_by(step))
            kept.update(made_by(step))
        else:
            kept.update(name for name in made_by(step) if cheap_calls(step, name) is None)
    return _bytes(ranked, kept, position) + places + working_bytes(ranked, tape, position)


def _bytes(ranked: RankProgram, names: Iterable[str], position: int) -> int:
    """Return the bytes of a cell's parts; other values, such as sums over whole maps, are small."""
    known = (name for name in names if name in ranked.splits or name in ranked.program.values)
    return sum(_elements(ranked, name, position) * ranked.values[name].dtype.itemsize for name in known)


def _elements(ranked: RankProgram, name: str, position: int) -> int:
    shape, split = ranked.values[name].shape, ranked.splits.get(name)
    return prod(shape if split is None else split.local_shape(shape, position))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device that has the maps."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
