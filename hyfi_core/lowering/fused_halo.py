"""Fused halos (Halo-D2): which window operators share one exchange, and what each rank computes so that they can.

    plain      x ─halo─ conv ─ norm ─ relu ─halo─ conv ─         an exchange before each window
    fused      x ─wide halo─ conv ─ norm ─ relu ─ conv ─         one, as wide as both windows together reach

    rank 0 computes  │ owned │ margin │        of the first result a margin that rank 1 computes, too;
                     │ owned │                 of the last one its own part alone

A run begins at values that are exchanged, or at the image, which is simply read wider. Within it every value has a
*computed* box: the rank's part and what later operators of the run need, never beyond the map. What an operator needs
beyond the map is padding, made anew by each operator: zero before a convolution, whatever bias and norm made of it.

Where to exchange, for runs of at most ``depth`` windows along any path. Go through the program in order, counting
windows since the last exchange. Where one more would be too many, exchange at its input; or, where that input comes
by a chain of operators from a value that others take as well (a cell's state, a block's input), at that value: its
branches then share one exchange, and the shortcut beside a block does not keep the next blocks from starting anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyfi_core.plan.box import Box
from hyfi_core.plan.fused_runs import Boxes, FusedRuns, covers
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.window import Window


@dataclass(frozen=True)
class Flow:
    """An operator that may be part of a run.

    Attributes:
        name: of the operator.
        takes: maps that it takes.
        makes: maps that it makes, all laid out alike.
        window: what it looks at; None: at the same pixels.
        flops: for one output pixel, all channels and images together.
        touched_bytes: likewise, read and written.
    """

    name: str
    takes: tuple[str, ...]
    makes: tuple[str, ...]
    window: Window | None = None
    flops: float = 0.0
    touched_bytes: float = 0.0

    def need(self, boxes: Boxes, whole: Box) -> Boxes:
        """Return what each rank needs of an input, within the map, to compute ``boxes`` of the results."""
        return boxes if self.window is None else _need(self.window, boxes, whole)


@dataclass(frozen=True)
class Sketch:
    """What planning knows of a program on a grid.

    Attributes:
        flows: operators that may be part of a run, in order.
        layouts: value -> who owns what.
        pixel_bytes: value -> bytes of one pixel, all channels and images together.
        readers: value -> how many operators take it.
        image: the value that is read and never exchanged.
        fixed: values that must come out as they are owned: other stages take them.
    """

    flows: tuple[Flow, ...]
    layouts: Mapping[str, Layout]
    pixel_bytes: Mapping[str, int]
    readers: Mapping[str, int]
    image: str
    fixed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Spread:
    """What follows from where runs begin.

    Attributes:
        computed: operator -> what each rank computes, where that is more than its part.
        wanted: exchanged value -> what each of the operators that reach beyond the parts needs of it.
    """

    computed: Mapping[str, Boxes]
    wanted: Mapping[str, tuple[Boxes, ...]]

    def runs(self, sketch: Sketch) -> FusedRuns:
        """Return the runs; an exchange that serves one operator alone is left to that operator's rule."""
        shared = {value: _joined(needs) for value, needs in self.wanted.items() if len(needs) > 1}
        return FusedRuns(frozenset(flow.name for flow in sketch.flows), self.computed, shared)


def unfused(sketch: Sketch) -> Spread:
    """Return what an exchange before each window operator comes to."""
    wanted: dict[str, tuple[Boxes, ...]] = {}
    for flow in sketch.flows:
        for value, need in reaching(sketch, flow, sketch.layouts[flow.makes[0]].parts):
            wanted[value] = (*wanted.get(value, ()), need)
    wanted.pop(sketch.image, None)
    return Spread({}, wanted)


def spread(sketch: Sketch, depth: int) -> Spread:
    """Return the runs of at most ``depth`` windows along any path."""
    exchanged = _exchanged(sketch, depth)
    inner = {value for flow in sketch.flows for value in flow.makes} - sketch.fixed - exchanged
    wide: dict[str, Boxes] = {}
    computed: dict[str, Boxes] = {}
    wanted: dict[str, tuple[Boxes, ...]] = {}
    for flow in reversed(sketch.flows):
        layout = sketch.layouts[flow.makes[0]]
        boxes = _joined([wide.get(value, layout.parts) for value in flow.makes])
        if boxes != layout.parts:
            computed[flow.name] = boxes
        for value, need in reaching(sketch, flow, boxes):
            if value in inner:
                wide[value] = _widened(sketch.layouts[value], wide.get(value), need)
            else:
                wanted[value] = (*wanted.get(value, ()), need)
    wanted.pop(sketch.image, None)  # read wider
    return Spread(computed, wanted)


def reaching(sketch: Sketch, flow: Flow, boxes: Boxes) -> list[tuple[str, Boxes]]:
    """Return the inputs of which some rank needs more than it owns, and what each rank needs of them.

    ``boxes``: what each rank computes of the results.
    """
    found = []
    for value in flow.takes:
        layout = sketch.layouts[value]
        need = flow.need(boxes, layout.map)
        if not _owned(layout, need):
            found.append((value, need))
    return found


# Networks repeat their blocks, and plans of several depths are compared: the same questions come again and again.


@lru_cache(maxsize=4096)
def _need(window: Window, boxes: Boxes, whole: Box) -> Boxes:
    return tuple(window.input_box(box).intersect(whole) for box in boxes)


@lru_cache(maxsize=4096)
def _owned(layout: Layout, need: Boxes) -> bool:
    return covers(layout.parts, need, layout.map)


def _exchanged(sketch: Sketch, depth: int) -> set[str]:
    """Return the values at which runs begin."""
    made_by = {value: at for at, flow in enumerate(sketch.flows) for value in flow.makes}
    grows = [[v for v, _ in reaching(sketch, flow, sketch.layouts[flow.makes[0]].parts)] for flow in sketch.flows]
    windows: dict[str, float] = {sketch.image: 0}
    exchanged: set[str] = set()
    at = 0
    while at < len(sketch.flows):
        flow = sketch.flows[at]
        counts = {v: (0 if v in exchanged else windows.get(v, math.inf)) + (v in grows[at]) for v in flow.takes}
        over = next((value for value in grows[at] if counts[value] > depth), None)
        if over is not None:
            begin = _branch_point(sketch, made_by, grows, over, depth)
            exchanged.add(begin)
            at = made_by.get(begin, -1) + 1  # what follows it counts anew
            continue
        for value in flow.makes:
            windows[value] = math.inf if value in sketch.fixed else max(counts.values())
        at += 1
    return exchanged


def _branch_point(
    sketch: Sketch, made_by: Mapping[str, int], grows: Sequence[Sequence[str]], value: str, depth: int
) -> str:
    """Return the value that several operators take and from which ``value`` alone comes; or ``value`` itself.

    The operators between must form a chain with room for one window more, the one that has to exchange.
    """
    here, passed = value, 1
    while sketch.readers.get(here, 0) < 2:
        at = made_by.get(here)
        if at is None or here in sketch.fixed or len(sketch.flows[at].takes) != 1:
            return value
        here = sketch.flows[at].takes[0]
        passed += bool(grows[at])
        if passed > depth or here == sketch.image:
            return value
    return here


def _joined(several: Sequence[Boxes]) -> Boxes:
    """Return, for each rank, the smallest box that covers its boxes of all."""
    result = several[0]
    for boxes in several[1:]:
        result = tuple(box.hull(other) for box, other in zip(result, boxes, strict=True))
    return result


@lru_cache(maxsize=4096)
def _widened(layout: Layout, boxes: Boxes | None, need: Boxes) -> Boxes:
    """Return what is computed already, and the need; along an axis with one rank always all of the map.

    Such a rank owns all of that axis, unless it owns nothing; then its margin alone must still span it, since there
    the padding is left to the native call.
    """
    result = []
    for box in _joined((layout.parts if boxes is None else boxes, need)):
        if box.empty:
            result.append(box)
            continue
        y0, y1 = (0, layout.height) if len(layout.rows) == 2 else (box.y0, box.y1)
        x0, x1 = (0, layout.width) if len(layout.columns) == 2 else (box.x0, box.x1)
        result.append(Box(y0, y1, x0, x1))
    return tuple(result)
