"""Convolutions on a GPU: on a canvas, where calls on own part and strips would be slow or wrong.

    apart          own part ──▶ one kernel        each strip ──▶ a kernel for each tap, and copies around them
    on a canvas    own part and strips copied together ──▶ one kernel

Cells of one process wait for no message, so there is nothing to overlap, and the host would start twenty kernels on
strips in the time of the copy. All ranks compute convolutions with stride and dilation on a canvas: called on the own
part with stride 2, dilation 2 and padding on both sides, cuDNN 9.19 on an H200 returned wrong cotangents of the map, in
bfloat16 and in channels-last float32; called on a canvas, which is padded as in one process, right ones.
"""

from __future__ import annotations

from dataclasses import replace

from hyfi_core.ops.convolution import Convolution
from hyfi_core.rules.instructions import CollectiveCall, Instruction


def for_gpu(instruction: Instruction, of_cells: bool) -> Instruction:
    """Return the instruction with convolutions on a canvas where that is necessary, or faster.

    Args:
        instruction: any.
        of_cells: whether ranks are the cells of a process.
    """
    if not isinstance(instruction, CollectiveCall) or not isinstance(instruction.operator, Convolution):
        return instruction
    convolution = instruction.operator
    axes = convolution.window.y, convolution.window.x
    is_sparse = any(axis.stride > 1 for axis in axes) and any(axis.dilation > 1 for axis in axes)
    if not is_sparse and not of_cells:
        return instruction
    # Rebuilt in backward: the own part is there anyway, and a kept canvas would be a second copy of each map.
    return replace(instruction, operator=replace(convolution, apart=False, keeps_canvas=False))
