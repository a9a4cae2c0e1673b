"""Fused halos (Halo-D2): which window operators share one exchange, and the margins that each rank computes for that.

    plain      x ─halo─ conv ─ norm ─ relu ─halo─ conv ─         an exchange before each window
    fused      x ─wide halo─ conv ─ norm ─ relu ─ conv ─         one, wide enough for both windows

    rank 0 computes  │ owned │ margin │        of the first result a margin that rank 1 computes, too;
                     │ owned │                 of the last one its own part alone

A fused run begins at values that are exchanged, or at the image, where ranks read wider boxes. In it, every value has
a *computed* box: the rank's part plus what later operators of the fused run need, within the map. Outside of the map
there is padding, created by each operator: zero before a convolution, regardless of earlier biases and norms.

Where to exchange, for fused runs of at most ``depth`` windows along any path. Go through the program in order, counting
windows since the last exchange. Where one more would exceed ``depth``, exchange its input; or, if that input comes
through a chain of operators from a value with several users (a cell's state, a block's input), exchange that value: its
branches then share one exchange, and a block's shortcut does not prevent the next blocks from starting a new run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce

from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.window import Window


@dataclass(frozen=True)
class Flow:
    """An operator that may be part of a fused run.

    Attributes:
        name: name of the operator.
        takes: input maps.
        makes: output maps, all with the same layout.
        window: its window; None for pointwise operators.
        flops: floating-point operations for one output pixel, all channels and images together.
        touched_bytes: bytes read and written for one output pixel, likewise.
    """

    name: str
    takes: tuple[str, ...]
    makes: tuple[str, ...]
    window: Window | None = None
    flops: float = 0.0
    touched_bytes: float = 0.0

    def need(self, boxes: Boxes, map_box: Box) -> Boxes:
        """Return the box of an input, within the map, that each rank needs to compute ``boxes`` of the results."""
        return boxes if self.window is None else _need(self.window, boxes, map_box)


@dataclass(frozen=True)
class Sketch:
    """A program on a grid, reduced to what choosing runs needs.

    Attributes:
        flows: operators that may be part of a fused run, in order.
        layouts: value -> layout.
        pixel_bytes: value -> bytes of one pixel, all channels and images together.
        readers: value -> number of operators that use it.
        image: the input image, which is read and never exchanged.
        owned_only: values that are computed on owned parts only, without margins, because other stages use them.
    """

    flows: tuple[Flow, ...]
    layouts: Mapping[str, Layout]
    pixel_bytes: Mapping[str, int]
    readers: Mapping[str, int]
    image: str
    owned_only: frozenset[str] = frozenset()

    @cached_property
    def inputs_with_halo(self) -> tuple[tuple[str, ...], ...]:
        """For each operator, the names of inputs that some rank needs beyond its own part, to compute owned results."""
        return tuple(
            tuple(value for value, _ in reaching(self, flow, self.layouts[flow.makes[0]].parts)) for flow in self.flows
        )


@dataclass(frozen=True)
class Margins:
    """The computed boxes and the exchanges for a choice of runs.

    Attributes:
        computed: operator -> boxes that ranks compute, if larger than their parts.
        exchanged: value -> for each operator that reads it beyond owned parts, the boxes that ranks need.
    """

    computed: Mapping[str, Boxes]
    exchanged: Mapping[str, tuple[Boxes, ...]]

    def runs(self, sketch: Sketch) -> FusedRuns:
        """Return the fused runs with the exchanges that several operators share; rules add the other exchanges."""
        several = {value: needs for value, needs in self.exchanged.items() if len(needs) > 1 and _same_grid(needs)}
        shared = {value: _joined(needs) for value, needs in several.items()}
        return FusedRuns(frozenset(flow.name for flow in sketch.flows), self.computed, shared)


def unfused(sketch: Sketch) -> Margins:
    """Return the exchanges with one before each window operator; no margins are computed."""
    exchanged: dict[str, tuple[Boxes, ...]] = {}
    for flow in sketch.flows:
        for value, need in reaching(sketch, flow, sketch.layouts[flow.makes[0]].parts):
            exchanged[value] = (*exchanged.get(value, ()), need)
    exchanged.pop(sketch.image, None)
    return Margins({}, exchanged)


def margins_of(sketch: Sketch, depth: int) -> Margins:
    """Return what ranks compute and exchange with fused runs of at most ``depth`` windows along any path."""
    exchanged = _starts_of_runs(sketch, depth)
    # Other stages receive owned parts, and an exchange begins with them: neither may have a margin.
    inner = {value for flow in sketch.flows for value in flow.makes} - sketch.owned_only - exchanged
    wide: dict[str, Boxes] = {}  # value -> the boxes of it that ranks compute, with margins
    computed: dict[str, Boxes] = {}  # operator -> the same
    needed_boxes: dict[str, tuple[Boxes, ...]] = {}  # exchanged value -> what each of its users needs
    for flow in reversed(sketch.flows):  # what an operator computes depends on what later ones need
        layout = sketch.layouts[flow.makes[0]]
        boxes = _joined([wide.get(value, layout.parts) for value in flow.makes])
        if boxes != layout.parts:
            computed[flow.name] = boxes
        for value, need in reaching(sketch, flow, boxes):
            # A map that is cut into strips of flattened positions has no rows and columns that could widen.
            if value in inner and need.same_grid_as(sketch.layouts[value].parts):
                wide[value] = _widened(sketch.layouts[value], wide.get(value), need)
            else:
                needed_boxes[value] = (*needed_boxes.get(value, ()), need)
    needed_boxes.pop(sketch.image, None)  # a wider box is read
    return Margins(computed=computed, exchanged=needed_boxes)


def reaching(sketch: Sketch, flow: Flow, boxes: Boxes) -> list[tuple[str, Boxes]]:
    """Return the inputs that some rank needs beyond its own part, as (name, box that each rank needs).

    ``boxes``: the box of the results that each rank computes.
    """
    needs = []
    for value in flow.takes:
        layout = sketch.layouts[value]
        need = flow.need(boxes, layout.map)
        if not _owned(layout, need):
            needs.append((value, need))
    return needs


@lru_cache(maxsize=4096)  # as below: networks repeat their blocks, and several depths are compared
def _need(window: Window, boxes: Boxes, map_box: Box) -> Boxes:
    return window.input_boxes(boxes).within(map_box)


@lru_cache(maxsize=4096)
def _owned(layout: Layout, need: Boxes) -> bool:
    """Whether every rank's part has all that it needs, within the map."""
    return layout.parts.cover(need, layout.map)


def _starts_of_runs(sketch: Sketch, depth: int) -> set[str]:
    """Return the values that ranks exchange: a fused run begins at each, and has at most ``depth`` windows.

    Where the next window would be one too many, its input is exchanged; or a value with several users that leads to it,
    since all branches from there then share one exchange.
    """
    made_by = {value: at for at, flow in enumerate(sketch.flows) for value in flow.makes}
    windows_behind: dict[str, float] = {sketch.image: 0}  # value -> windows since the last exchange
    exchanged: set[str] = set()
    at = 0
    while at < len(sketch.flows):
        flow, with_halo = sketch.flows[at], sketch.inputs_with_halo[at]
        counts: dict[str, float] = {}  # input -> windows since the last exchange, with this operator
        for value in flow.takes:
            # What no flow makes has no margin: infinity, so that the next window exchanges it.
            behind = 0 if value in exchanged else windows_behind.get(value, math.inf)
            counts[value] = behind + 1 if value in with_halo else behind
        over = next((value for value in with_halo if counts[value] > depth), None)
        if over is not None:
            begin = _branch_point(sketch, made_by, over, depth)
            exchanged.add(begin)
            # Go back to the first operator after the new exchange: counts from there on have changed.
            at = made_by.get(begin, -1) + 1
            continue
        for value in flow.makes:
            # A value of owned parts only has no margin, so that the next window exchanges it at any depth.
            windows_behind[value] = math.inf if value in sketch.owned_only else max(counts.values())
        at += 1
    return exchanged


def _branch_point(sketch: Sketch, made_by: Mapping[str, int], value: str, depth: int) -> str:
    """Return the value to exchange before a window that takes ``value``: this value, or one that several users share.

    It is the nearest value with several users that leads to ``value`` by a chain of operators with one input each, if
    the windows of that chain and the window that takes ``value`` are at most ``depth``. Otherwise it is ``value``.

    Args:
        sketch: the operators.
        made_by: value -> index of the operator that makes it.
        value: input of a window that would be one too many in its run.
        depth: most windows of a run.
    """
    candidate, windows = value, 1  # the window that takes ``value``
    while sketch.readers.get(candidate, 0) < 2:
        maker = made_by.get(candidate)
        # A value of owned parts only has no margin, so no run passes through it; what no operator makes ends the chain.
        if maker is None or candidate in sketch.owned_only or len(sketch.flows[maker].takes) != 1:
            return value
        (candidate,) = sketch.flows[maker].takes
        # A window counts if a rank needs more of its input than its own part; a 1 x 1 kernel does not.
        windows += bool(sketch.inputs_with_halo[maker])
        if windows > depth or candidate == sketch.image:
            return value
    return candidate


def _same_grid(several: Sequence[Boxes]) -> bool:
    return all(boxes.same_grid_as(several[0]) for boxes in several)


def _joined(several: Sequence[Boxes]) -> Boxes:
    """Return for each rank the smallest box that covers its box in each of ``several``."""
    return reduce(Boxes.hull, several)


@lru_cache(maxsize=4096)
def _widened(layout: Layout, boxes: Boxes | None, need: Boxes) -> Boxes:
    """Return the boxes that cover both ``boxes`` and ``need``; along an axis with one rank, the whole map.

    Along such an axis, the native call pads, so it must get all of the axis: also on a rank whose own part is empty.
    """
    result = (layout.parts if boxes is None else boxes).hull(need)
    # ``layout.rows`` has the start of each row of ranks and the end of the last: two numbers for one row.
    if len(layout.rows) == 2:
        result = replace(result, rows=((0, layout.height),))
    if len(layout.columns) == 2:
        result = replace(result, columns=((0, layout.width),))
    return result
