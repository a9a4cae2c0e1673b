"""Convolutions on a GPU: on a canvas, where calls on own part and strips would be slow or wrong.

    apart          own part ──▶ one kernel        each strip ──▶ a kernel for each tap, and copies around them
    on a canvas    own part and strips copied together ──▶ one kernel

Cells of one process wait for no message, so there is nothing to overlap, and the host would start twenty kernels on
strips in the time of the copy. All ranks compute convolutions with stride and dilation on a canvas of which the padding
is part. On an H200 two columns of ranks had wrong gradients in bfloat16 and channels-last float32, and such a
convolution was thought to be the cause. CUDA's average pool, which forgets its padding (see ``ops.avg_pool``), was not
yet known.
Its fault alone explains all that was seen: which plans, dtypes and formats were wrong. The canvas stays until columns
have run on a GPU without it.
"""

from __future__ import annotations

from dataclasses import replace

from hyfi_core.ops.convolution import Convolution, is_sparse
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
    # Cells wait for no message, so nothing would be hidden by computing inner pixels apart; a window with stride and
    # dilation is computed on a canvas because its gradients might be wrong otherwise.
    if not is_sparse(convolution.window) and not of_cells:
        return instruction
    # Rebuilt in backward: the own part is there anyway, and a kept canvas would be a second copy of each map.
    return replace(instruction, operator=replace(convolution, apart=False, keeps_canvas=False))
