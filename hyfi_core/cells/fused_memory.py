"""Choice of fused runs for cells: a trade-off between memory and redundant work.

    image ── run ── map ── run ── map ── run ── output        four cells, three runs
    cell 0   ════╗       ╔═════╗       ╔══                    within a run: maps of one cell;
    cell 1       ╚═══╗   ║     ║       ║                      between two runs: every cell's part of the map
    …                ╚═══╝     ╚══…

Long runs need little memory and compute wide margins redundantly; short ones the reverse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.cells.fused_place import CELL_RULES
from hyfi_core.cost.machine import DEFAULT_MACHINE
from hyfi_core.cost.operators import value_bytes
from hyfi_core.lowering.fused_halo import Sketch, Spread, reaching, spread
from hyfi_core.lowering.fused_sketch import draw
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.plan.box import hull
from hyfi_core.plan.fused_runs import Boxes, FusedRuns

DEPTHS = (2, 4, 8, 12, 16, 24, 1000)
"""Lengths of runs to try: number of windows along any path."""


@dataclass(frozen=True)
class Price:
    """Cost of a choice of runs.

    Attributes:
        peak_bytes: modelled peak of all maps that exist at the same time.
        work: of all cells together relative to one process; 1 without redundant work.
    """

    peak_bytes: float
    work: float

    @property
    def product(self) -> float:
        """The objective: half the memory is worth twice the work."""
        return self.peak_bytes * self.work


def runs_for_cells(program: Program, grid: tuple[int, int]) -> tuple[FusedRuns, Price]:
    """Return the runs with the smallest product of peak and work, and their cost.

    Args:
        program: in evaluation mode.
        grid: rows and columns of cells.

    Raises:
        RequestError: an operator cannot be computed part by part.
    """
    alive = program.needed({*refs_in(program.outputs), *program.mutations.values()})
    operators = [op for op in program.operators if any(name in alive for name in op.outputs if name is not None)]
    if grid == (1, 1):
        made_here = {name for op in operators for name in op.outputs if name is not None}
        lives = _lives(program.image, made_here, operators)
        return FusedRuns(), Price(_peak(lives, {name: value_bytes(program, name) for name in lives}), 1.0)
    trial = lower(program, Target(grid, 0, CELL_RULES))
    sketch = draw(program, operators, trial.splits, trial.fusible, ())
    plans: list[Spread] = []
    for depth in DEPTHS:
        plans.append(spread(sketch, depth))
        if not plans[-1].wanted:
            break  # no exchange is left
    prices = [price(sketch, operators, trial.splits, plan) for plan in plans]
    best = min(range(len(plans)), key=lambda at: prices[at].product)
    return plans[best].runs(sketch), prices[best]


def price(sketch: Sketch, operators: Sequence[Operator], maps: Collection[str], plan: Spread) -> Price:
    """Return the cost of a choice of runs.

    Args:
        sketch: the program.
        operators: all operators in order; those that are not in the sketch end a run.
        maps: values that are split over the cells.
        plan: the ends of runs, and the computed boxes.
    """
    return Price(_peak_bytes(sketch, operators, maps, plan), _work(sketch, plan))


def _peak_bytes(sketch: Sketch, operators: Sequence[Operator], maps: Collection[str], plan: Spread) -> float:
    """Return the peak of live maps: of one cell, or of all cells for maps that live across a point where cells wait.

    An operator that exchanges keeps its input until all cells have reached it; a reduction does not.
    """
    known = _lives(sketch.image, sketch.layouts, operators)
    lives = {value: life for value, life in known.items() if value in sketch.layouts}  # the image may be in no run
    waits = sorted(_waits(sketch, operators, maps, plan))
    sizes = dict(_cell_bytes(sketch, plan))
    for value, (made, last) in lives.items():
        if any(2 * made + 1 < at <= 2 * last for at in waits):
            sizes[value] = sketch.layouts[value].map.area * sketch.pixel_bytes[value]
    return _peak(lives, sizes)


def _peak(lives: Mapping[str, tuple[int, int]], sizes: Mapping[str, float]) -> float:
    """Return the largest sum of sizes of values that are alive at the same time."""
    change: dict[int, float] = {}
    for value, (made, last) in lives.items():
        change[made] = change.get(made, 0.0) + sizes[value]
        change[last + 1] = change.get(last + 1, 0.0) - sizes[value]
    alive, peak = 0.0, 0.0
    for place in sorted(change):
        alive += change[place]
        peak = max(peak, alive)
    return peak


def _lives(image: str, values: Collection[str], operators: Sequence[Operator]) -> dict[str, tuple[int, int]]:
    """Return the index of the operator that computes each value, and of the last one that uses it."""
    lives = {image: (-1, -1)}
    for at, op in enumerate(operators):
        lives.update((name, (at, at)) for name in op.outputs if name is not None and name in values)
        lives.update((name, (lives[name][0], at)) for name in op.inputs if name in lives)
    return lives


def _waits(sketch: Sketch, operators: Sequence[Operator], maps: Collection[str], plan: Spread) -> Iterator[int]:
    """Yield where cells wait for each other: 2 · index before an operator, one more if its inputs have been freed."""
    flows = {flow.name: flow for flow in sketch.flows}
    exchanged: set[str] = set()
    for at, op in enumerate(operators):
        flow = flows.get(op.name)
        if flow is not None:
            boxes = plan.computed.get(flow.name, sketch.layouts[flow.makes[0]].parts)
            new = {value for value, _ in reaching(sketch, flow, boxes) if value in plan.wanted} - exchanged
            exchanged |= new
            if new:
                yield 2 * at
        elif any(name in maps for name in op.inputs):
            yield 2 * at if any(name in maps for name in op.outputs) else 2 * at + 1


def _cell_bytes(sketch: Sketch, plan: Spread) -> Mapping[str, float]:
    """Return map -> bytes of the largest part that a cell computes, or reads of the image."""
    read: list[Boxes] = []
    found = {value: _largest(layout.parts) * sketch.pixel_bytes[value] for value, layout in sketch.layouts.items()}
    for flow in sketch.flows:
        boxes = plan.computed.get(flow.name, sketch.layouts[flow.makes[0]].parts)
        found.update((value, _largest(boxes) * sketch.pixel_bytes[value]) for value in flow.makes)
        if sketch.image in flow.takes:
            read.append(flow.need(boxes, sketch.layouts[sketch.image].map))
    if read:
        boxes = tuple(hull(needs) for needs in zip(*read, strict=True))
        found[sketch.image] = _largest(boxes) * sketch.pixel_bytes[sketch.image]
    return found


def _largest(boxes: Boxes) -> float:
    return float(max(box.area for box in boxes))


def _work(sketch: Sketch, plan: Spread) -> float:
    """Return the modelled time of all cells relative to one process."""
    done = once = 0.0
    for flow in sketch.flows:
        layout = sketch.layouts[flow.makes[0]]
        pixel_s = DEFAULT_MACHINE.operator_s(flow.flops, flow.touched_bytes)
        done += pixel_s * sum(box.area for box in plan.computed.get(flow.name, layout.parts))
        once += pixel_s * layout.map.area
    return done / once if once else 1.0
