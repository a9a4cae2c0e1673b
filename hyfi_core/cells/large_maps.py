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
from math import prod

import torch

from hyfi_core.capture.program import Program
from hyfi_core.plan.parallel_plan import ParallelPlan

LARGEST_VALUES = 2**31 - 1
"""Values of the largest map that kernels index with 32 bits."""


def largest_map(program: Program, plan: ParallelPlan) -> int:
    """Return the values of the largest map of any rank, or cell.

    Args:
        program: the captured model, of one micro-batch.
        plan: of the run.
    """
    maps = [prod(info.shape) for info in program.values.values() if len(info.shape) == 4]
    cells = plan.cells if isinstance(plan.cells, tuple) else (1, 1)
    return -(-max(maps, default=0) // (min(map(prod, plan.grids)) * prod(cells)))


def fewest_cells(program: Program, plan: ParallelPlan, device: torch.device) -> int:
    """Return the fewest rows, and columns, of cells for which kernels of the device are fast; 1 on a CPU."""
    if device.type == "cpu":
        return 1
    sides, values = 1, largest_map(program, plan)
    while values > LARGEST_VALUES * sides**2:
        sides += 1
    return sides


def warn_of_slow_kernels(program: Program, plan: ParallelPlan, device: torch.device) -> None:
    """Warn if a map is too large for the fast kernels of a GPU."""
    sides = fewest_cells(program, plan, device)
    if sides > 1:
        warnings.warn(
            f"a feature map has {largest_map(program, plan):,} values on one rank; from 2,147,483,648 on, kernels of "
            f"a GPU take up to a hundred times as long. plan.cells=({sides}, {sides}) or 'auto' computes the same in "
            f"parts that are small enough; more ranks do, too",
            stacklevel=6,
        )
