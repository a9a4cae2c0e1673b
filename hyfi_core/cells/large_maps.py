"""Maps that are too large for a GPU's kernels: divided into cells, they are fast.

Kernels index a map of fewer than 2³¹ values with 32 bits. For larger ones PyTorch and cuDNN have others, with indices
of 64 bits, or copy the map to another order. On an H200, four times the pixels took

    7 × 7 convolution of 3 channels, forward and gradient of the weight      118 and 446 times as long
    batch norm, backward                                                      19
    1 × 1 convolution of 256 channels, gradient of the weight                 13
    3 × 3 convolution of 64 channels, gradient of the weight                   8
    all others                                                               3.6 to 7
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import prod

from hyfi_core.capture.program import Program
from hyfi_core.capture.stages import cut_program
from hyfi_core.cost.memory.forecast import BORDERS
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement

LARGEST_VALUES = 2**31 - 1
"""Values of the largest map that kernels index with 32 bits."""


def largest_map(program: Program, plan: ParallelPlan) -> int:
    """Return the number of values of the largest map on any rank or in any cell; unequal parts and halos not counted.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
    """
    stages = cut_program(program, program.outputs, () if plan.cuts == "auto" else plan.cuts)
    largest = 1
    for stage, (rows, columns) in zip(stages, Placement.of(plan).grids, strict=True):
        names = {name for op in stage.program.operators for name in op.outputs if name is not None}
        shapes = [program.values[name].shape for name in names if name in program.values]
        values = max((prod(shape) for shape in shapes if len(shape) == 4), default=1)
        largest = max(largest, -(-values // (rows * columns)))
    return -(-largest // prod(plan.cell_grid or (1, 1)))


def fewest_cells(program: Program, plan: ParallelPlan) -> int:
    """Return the fewest rows (and columns) of cells for which the kernels of a GPU are fast.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts; its cells do not matter.
    """
    sides, values = 1, largest_map(program, replace(plan, cells=None, spill=None))
    # BORDERS: parts of a divided map are larger by halos and unequal division.
    while (BORDERS if sides > 1 else 1.0) * values > LARGEST_VALUES * sides**2:
        sides += 1
    return sides


def warn_of_slow_kernels(program: Program, plan: ParallelPlan, cells_are_possible: bool) -> None:
    """Warn if a map is too large for the fast kernels of a GPU.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
        cells_are_possible: whether ranks can compute their parts in cells.
    """
    values = largest_map(program, plan)
    if values > LARGEST_VALUES:
        sides = fewest_cells(program, plan)
        ways = f"plan.cells=({sides}, {sides}) computes" if cells_are_possible else "more ranks in plan.grids compute"
        warnings.warn(
            f"a feature map has {values:,} values on one rank{' or cell' if plan.cells else ''}; from 2,147,483,648 "
            f"on, kernels of a GPU take up to a hundred times as long. {ways} the same in parts that are small enough",
            stacklevel=6,
        )
