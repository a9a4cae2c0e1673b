"""Length of fused runs: ``fused_halo="auto"`` weighs halo exchanges against redundant computation of margins."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, Protocol

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.lowering.fused_halo import Margins, Sketch, margins_of, unfused
from hyfi_core.lowering.fused_sketch import sketch_of
from hyfi_core.lowering.lower import Target, lower, lowered_operators
from hyfi_core.plan.boxes import Boxes, Interval, length, meeting
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.rules.instructions import RankProgram, Split

DEPTHS = (2, 3, 4, 6)
"""Lengths of runs that "auto" tries, besides 1."""


def fused_runs(
    program: Program,
    target: Target,
    outputs: tuple[Any, ...] | None = None,
    exits: tuple[str, ...] = (),
    fused_halo: int | str = "auto",
    machine: MachineModel | None = None,
) -> FusedRuns:
    """Return the fused runs of a rank's program for a value of ``plan.fused_halo``.

    A number n: fused runs of at most n windows along any path; with 1, every operator has its own exchange. "auto": the
    cheapest of the lengths 1, 2, 3, 4 and 6, the shorter of equals, by this rule::

        cost = 2 · Σ exchanges  max over ranks (time of the messages received)
             + 3 · Σ operators  max over ranks (margin pixels · time of a pixel)

    The factor of the exchange is 2, since backward sends as much as forward; that of the work is 3, since backward
    computes gradients of inputs and of weights. Wider boxes of the image cost no message. The work is slightly
    overestimated (its maxima are on different ranks), so runs are fused only if it clearly pays.

    Args:
        program: the captured model.
        target: the rank to lower for.
        outputs: leaves of the output; None for all that the model returns.
        exits: values that other stages need.
        fused_halo: ``plan.fused_halo``.
        machine: the machine model; None: the reference machine.

    Raises:
        RequestError: ``lower`` refuses the program.
    """
    return runs_and_trial(program, target, outputs, exits, fused_halo, machine or reference_machine())[0]


def runs_and_trial(
    program: Program,
    target: Target,
    outputs: tuple[Any, ...] | None,
    exits: tuple[str, ...],
    fused_halo: int | str,
    machine: MachineModel,
    layouts: Unfused | None = None,
) -> tuple[FusedRuns, RankProgram | None]:
    """Return (fused runs for a value of ``plan.fused_halo``, the program lowered without fused runs).

    The runs are those of at most so many windows, or the cheapest for ``auto``. The program is None if the choice did
    not need it, or had ``layouts`` instead.

    Args:
        program: the captured model.
        target: the rank to lower for.
        outputs: leaves of the output; None for all that the model returns.
        exits: values that other stages need.
        fused_halo: ``plan.fused_halo``.
        machine: the machine model.
        layouts: how the program's values are split without fused runs; None: the program is lowered to see.

    Raises:
        RequestError: ``lower`` refuses the program.
    """
    if fused_halo == 1 or target.grid == (1, 1):
        return FusedRuns(), None
    trial = lower(program, target, outputs, exits) if layouts is None else None
    layouts = trial or layouts
    assert layouts is not None
    operators = lowered_operators(program, program.outputs if outputs is None else outputs, exits)
    sketch = sketch_of(program, operators, layouts.splits, layouts.fusible, exits)
    if fused_halo != "auto":
        return margins_of(sketch, int(fused_halo)).runs(sketch), trial
    # Without fused runs, each operator has its own exchange, even if several operators need the same value.
    best, least = None, cost(sketch, unfused(sketch), shares=False, machine=machine)
    for depth in DEPTHS:
        candidate = margins_of(sketch, depth)
        seconds = cost(sketch, candidate, machine=machine)
        if seconds < least:
            best, least = candidate, seconds
    return FusedRuns() if best is None else best.runs(sketch), trial


class Unfused(Protocol):
    """How the values of a program are split over ranks without fused runs, as a ``RankProgram`` has it."""

    @property
    def splits(self) -> Mapping[str, Split]:
        """The layout of each split value."""
        ...

    @property
    def fusible(self) -> frozenset[str]:
        """Operators whose rules can compute margins."""
        ...


def cost(sketch: Sketch, margins: Margins, shares: bool = True, machine: MachineModel | None = None) -> float:
    """Return the seconds of a step that the fused runs change, by the formula of ``fused_runs``.

    Args:
        sketch: the layouts of the program's values, and its operators.
        margins: the exchanges, and the boxes that each rank computes.
        shares: whether operators that need the same value share one exchange.
        machine: the machine model; None: the reference machine.
    """
    machine = machine or reference_machine()
    total = 0.0
    shared = margins.runs(sketch).shared if shares else {}
    for value, needs in margins.exchanged.items():
        exchanges = (shared[value],) if value in shared else needs
        total += 2 * sum(_exchange_s(sketch, value, need, machine) for need in exchanges)  # forward and backward
    for flow in sketch.flows:
        boxes = margins.computed.get(flow.name)
        if boxes is not None:
            margin = _most_added(sketch.layouts[flow.makes[0]].parts, boxes)
            # A forward, and two gradients that take as long each.
            total += 3 * margin * machine.operator_s(flow.flops, flow.touched_bytes)
    return total


@lru_cache(maxsize=4096)  # networks repeat their blocks
def _most_added(parts: Boxes, boxes: Boxes) -> int:
    """Return the largest number of pixels by which a rank's box is larger than its part."""
    # Sets: most rows of ranks are alike, and the largest margin needs each kind once.
    rows = {(length(part), length(box)) for part, box in zip(parts.rows, boxes.rows, strict=True)}
    columns = {(length(part), length(box)) for part, box in zip(parts.columns, boxes.columns, strict=True)}
    return max(box_y * box_x - part_y * part_x for part_y, box_y in rows for part_x, box_x in columns)


def _exchange_s(sketch: Sketch, value: str, need: Boxes, machine: MachineModel) -> float:
    """Return the seconds of an exchange: of the rank whose messages take the longest.

    Args:
        sketch: has the layouts.
        value: the map that is exchanged.
        need: the box of the map that each rank needs.
        machine: the machine model.
    """
    parts = sketch.layouts[value].parts
    if not parts.same_grid_as(need):
        return _exchange_by_rank_s(sketch, value, need, machine)
    # Boxes are products of intervals: a rank receives from (owners along y) x (owners along x) ranks; pixels alike.
    slowest_s = 0.0
    for y, x in product(_axis_needs(parts.rows, need.rows), _axis_needs(parts.columns, need.columns)):
        owns_some = y.own_px > 0 and x.own_px > 0
        messages = y.owners * x.owners - (1 if owns_some else 0)  # none from itself
        received_px = y.px * x.px - y.own_px * x.own_px
        slowest_s = max(slowest_s, machine.messages_s(messages, received_px * sketch.pixel_bytes[value]))
    return slowest_s


def _exchange_by_rank_s(sketch: Sketch, value: str, need: Boxes, machine: MachineModel) -> float:
    """As ``_exchange_s``, but slower and for grids that may differ: from the transfer of each rank."""
    layout = sketch.layouts[value]
    slowest_s = 0.0
    for rank in range(len(layout.parts)):
        transfer = plan_transfer(layout.parts, need, layout.map, rank)
        received_bytes = transfer.received_px * sketch.pixel_bytes[value]
        slowest_s = max(slowest_s, machine.messages_s(len(transfer.receives), received_bytes))
    return slowest_s


@dataclass(frozen=True, slots=True)
class _AxisNeed:
    """The interval that a row of ranks needs along y, or a column along x.

    Attributes:
        owners: number of rows (or columns) that own some of it.
        px: length of the interval, within the map.
        own_px: length of its part that the row itself owns.
    """

    owners: int
    px: int
    own_px: int


@lru_cache(maxsize=4096)  # networks repeat their blocks
def _axis_needs(parts: tuple[Interval, ...], need: tuple[Interval, ...]) -> frozenset[_AxisNeed]:
    """Return the distinct needs of all rows of ranks, or of all columns; most rows need the same.

    Args:
        parts: the interval that each row owns.
        need: the interval that each row needs.
    """
    starts, stops = [start for start, _ in parts], [stop for _, stop in parts]
    ordered = all(a <= b for ends in (starts, stops) for a, b in pairwise(ends))
    needs = set()
    for row, interval in enumerate(need):
        first, last = 0, len(parts)
        if ordered:
            # Those that meet the interval are next to each other: from the first that ends behind its start, up to
            # the first that begins at its end or later.
            first, last = bisect_right(stops, interval[0]), bisect_left(starts, interval[1])
        px_of = {first + part: length(overlap) for part, overlap in meeting(parts[first:last], interval)}
        needs.add(_AxisNeed(owners=len(px_of), px=sum(px_of.values()), own_px=px_of.get(row, 0)))
    return frozenset(needs)
