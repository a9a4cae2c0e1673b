"""Choice of fused runs for cells: a trade-off between memory and redundant work.

    image ── run ── map ── run ── map ── run ── output        four cells, three runs
    cell 0   ════╗       ╔═════╗       ╔══                    within a fused run: maps of one cell;
    cell 1       ╚═══╗   ║     ║       ║                      between two runs: every cell's part of the map
    …                ╚═══╝     ╚══…

A long run needs little memory, but computes wide margins redundantly; a short run needs more memory and less work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hyfi_core.capture.program import Operator, Program
from hyfi_core.cells.fused_place import CELL_OPERATORS
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.operators import value_bytes
from hyfi_core.lowering.fused_halo import Margins, Sketch, margins_of, reaching
from hyfi_core.lowering.fused_sketch import sketch_of
from hyfi_core.lowering.lower import Target, lower, lowered_operators
from hyfi_core.plan.box import hull
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.fused_runs import FusedRuns

DEPTHS = (2, 4, 8, 12, 16, 24, 1000)
"""Lengths of runs to try: number of windows along any path."""


@dataclass(frozen=True)
class RunCost:
    """Cost of a choice of runs.

    Attributes:
        peak_bytes: modelled peak of all maps that exist at the same time.
        work: work of all cells together relative to one process; 1 without redundant work.
        step_bytes: inputs and outputs of the largest operator in one cell.
    """

    peak_bytes: float
    work: float
    step_bytes: float = 0.0

    @property
    def product(self) -> float:
        """The objective: half the memory is worth twice the work."""
        return self.peak_bytes * self.work


def runs_for_cells(program: Program, grid: tuple[int, int]) -> tuple[FusedRuns, RunCost]:
    """Return the fused runs with the smallest product of peak memory and work, and their cost.

    Args:
        program: the captured model in evaluation mode.
        grid: rows and columns of cells.

    Raises:
        RequestError: an operator cannot be computed part by part.
    """
    operators = lowered_operators(program, program.outputs, ())
    if grid == (1, 1):
        made_here = {name for op in operators for name in op.outputs if name is not None}
        lives = _lives(program.image, made_here, operators)
        peak_bytes = _peak(lives, {name: value_bytes(program, name) for name in lives})
        return FusedRuns(), RunCost(peak_bytes, work=1.0)
    # Lowered once without fused runs: this gives the layouts, and the operators that can be in a run.
    trial = lower(program, Target(grid, 0, CELL_OPERATORS))
    sketch = sketch_of(program, operators, trial.splits, trial.fusible, ())
    choices: list[Margins] = []
    # Longer runs exchange less often; once nothing is exchanged, still longer ones would be the same.
    for depth in DEPTHS:
        choices.append(margins_of(sketch, depth))
        if not choices[-1].exchanged:
            break
    costs = [cost_of(sketch, operators, trial.splits, margins) for margins in choices]
    best = min(range(len(choices)), key=lambda at: costs[at].product)
    return choices[best].runs(sketch), costs[best]


class CellCosts:
    """What a program costs in cells, by their grid; its fused runs are chosen once for each.

    Args:
        program: the captured model in evaluation mode.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[int, int], RunCost] = {}

    def of(self, grid: tuple[int, int]) -> RunCost:
        """Return the peak memory and the work with these rows and columns of cells, by the best fused runs; cached.

        Raises:
            RequestError: as ``runs_for_cells``.
        """
        if grid not in self._known:
            _, self._known[grid] = runs_for_cells(self.program, grid)
        return self._known[grid]


def cost_of(sketch: Sketch, operators: Sequence[Operator], maps: Collection[str], margins: Margins) -> RunCost:
    """Return the cost of a choice of runs.

    Args:
        sketch: the program.
        operators: all operators in order; those that are not in the sketch end a fused run.
        maps: names of the values that are divided among cells.
        margins: boxes and exchanges of the chosen runs.
    """
    sizes = _cell_bytes(sketch, margins)

    def touched_bytes(op: Operator) -> float:
        return sum(sizes.get(str(name), 0.0) for name in (*op.inputs, *op.outputs))

    return RunCost(
        peak_bytes=_peak_bytes(sketch, operators, maps, margins, sizes),
        work=_work(sketch, margins),
        step_bytes=max(map(touched_bytes, operators), default=0.0),
    )


def _peak_bytes(
    sketch: Sketch,
    operators: Sequence[Operator],
    maps: Collection[str],
    margins: Margins,
    cell_bytes: Mapping[str, float],
) -> float:
    """Return the peak of the bytes of maps that are alive at the same time.

    A map that is alive while cells wait for each other counts with the parts of all cells, any other one with that of
    one cell. An operator that exchanges keeps its input until all cells have reached it; a reduction does not.
    """
    all_lives = _lives(sketch.image, sketch.layouts, operators)
    lives = {value: life for value, life in all_lives.items() if value in sketch.layouts}  # the image may be in no run
    waits = list(_waits(sketch, operators, maps, margins))
    sizes = dict(cell_bytes)
    for value, (first, last) in lives.items():
        # Alive while other cells run: the parts of all cells exist at once.
        if any(2 * first + 1 < place <= 2 * last for place in waits):
            sizes[value] = sketch.layouts[value].map.area * sketch.pixel_bytes[value]
    return _peak(lives, sizes)


def _peak(lives: Mapping[str, tuple[int, int]], sizes: Mapping[str, float]) -> float:
    """Return the largest sum of sizes of values that are alive at the same time."""
    change: dict[int, float] = {}
    for value, (first, last) in lives.items():
        change[first] = change.get(first, 0.0) + sizes[value]
        # + 1: during its last use, an operator's inputs and outputs are in memory together.
        change[last + 1] = change.get(last + 1, 0.0) - sizes[value]
    alive, peak = 0.0, 0.0
    for point in sorted(change):
        alive += change[point]
        peak = max(peak, alive)
    return peak


def _lives(image: str, values: Collection[str], operators: Sequence[Operator]) -> dict[str, tuple[int, int]]:
    """Return value -> (index of the operator that computes it, index of the last one that uses it); -1: the image."""
    lives = {image: (-1, -1)}
    for at, op in enumerate(operators):
        lives.update((name, (at, at)) for name in op.outputs if name is not None and name in values)
        lives.update((name, (lives[name][0], at)) for name in op.inputs if name in lives)
    return lives


def _waits(sketch: Sketch, operators: Sequence[Operator], maps: Collection[str], margins: Margins) -> Iterator[int]:
    """Yield the places at which cells wait for each other: where they exchange parts of maps, or reduce maps.

    A place is 2 · index for a wait before an operator, while its inputs are alive, and 2 · index + 1 for one after it
    (in a reduction, whose inputs have then been freed). So a value made by operator ``first`` and last used by ``last``
    is alive at place p if 2 · first + 1 < p <= 2 · last.
    """
    flows = {flow.name: flow for flow in sketch.flows}
    exchanged: set[str] = set()
    for at, op in enumerate(operators):
        flow = flows.get(op.name)
        if flow is not None:
            boxes = margins.computed.get(flow.name, sketch.layouts[flow.makes[0]].parts)
            # Each value is exchanged once, before the first operator that needs neighbours' pixels of it.
            exchanges = {value for value, _ in reaching(sketch, flow, boxes) if value in margins.exchanged} - exchanged
            exchanged |= exchanges
            if exchanges:
                yield 2 * at
        # Any other operator on maps needs those of all cells; its result may be a map again, or no longer be one.
        elif any(name in maps for name in op.inputs):
            yield 2 * at if any(name in maps for name in op.outputs) else 2 * at + 1


def _cell_bytes(sketch: Sketch, margins: Margins) -> Mapping[str, float]:
    """Return map -> bytes of the largest part that a cell computes of it; for the image, the largest that one reads."""
    read: list[Boxes] = []
    sizes = {value: layout.parts.largest * sketch.pixel_bytes[value] for value, layout in sketch.layouts.items()}
    # A flow is an operator that a fused run may contain; inside of a run, cells also compute margins of their parts.
    for flow in sketch.flows:
        boxes = margins.computed.get(flow.name, sketch.layouts[flow.makes[0]].parts)
        sizes.update((value, boxes.largest * sketch.pixel_bytes[value]) for value in flow.makes)
        if sketch.image in flow.takes:
            read.append(flow.need(boxes, sketch.layouts[sketch.image].map))
    if read:
        sizes[sketch.image] = _largest_read(read) * sketch.pixel_bytes[sketch.image]
    return sizes


def _largest_read(read: Sequence[Boxes]) -> int:
    """Return the largest number of pixels of the image that a cell reads, for all operators that take it.

    Args:
        read: the boxes of all cells, for each of these operators; mostly there is one.
    """
    if len(read) == 1:
        return read[0].largest  # computed by rows and columns: there may be tens of thousands of cells
    return max(hull(needs).area for needs in zip(*read, strict=True))


def _work(sketch: Sketch, margins: Margins) -> float:
    """Return the modelled time of all cells relative to one process."""
    computed = once = 0.0
    for flow in sketch.flows:
        layout = sketch.layouts[flow.makes[0]]
        pixel_s = reference_machine().operator_s(flow.flops, flow.touched_bytes)
        computed += pixel_s * margins.computed.get(flow.name, layout.parts).area
        once += pixel_s * layout.map.area
    return computed / once if once else 1.0
