"""Rules for ``F.unfold`` and ``Tensor.unfold``, which copy the pixels of windows, and ``F.fold``, which adds them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.rules.accepted_maps import on_maps, one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import emit_on_part, pair
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.axis import Axis, reach, scattered
from hyfi_core.rules.operator_facts import OperatorFacts


def _axis_of_windows(outputs: int, kernel: int, dilation: int, padding: int, stride: int) -> Axis:
    """Return the axis on which window ``i`` starts at input ``i * stride - padding``."""
    return Axis(
        outputs,
        lambda start, stop: (start * stride - padding, (stop - 1) * stride - padding + dilation * (kernel - 1) + 1),
    )


def unfold(builder: Builder, op: Operator) -> None:
    """``F.unfold``: (B, C, H, W) to (B, C · kernel, windows), with windows in row-major order."""
    name = op.args[0].name
    kernel, dilation, padding, stride = (pair(setting) for setting in op.args[1:5])
    sizes = builder.shape(name)[2:]
    counts = _windows(sizes, kernel, dilation, padding, stride)
    axes = tuple(
        _axis_of_windows(*settings) for settings in zip(counts, kernel, dilation, padding, stride, strict=True)
    )
    reached = reach(builder, name, (axes[0], axes[1]))
    # Windows are positions: their grid is flattened into one dim.
    split = Split(reached.split.layout, (2, 2))
    builder.compute(lambda tensor: F.unfold(tensor, kernel, dilation, 0, stride), (reached.canvas,), op.outputs, split)


def _windows(
    sizes: tuple[int, ...],
    kernel: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    stride: tuple[int, int],
) -> tuple[int, int]:
    """Return the number of windows, (y, x)."""
    rows, columns = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, d, p, s in zip(sizes, kernel, dilation, padding, stride, strict=True)
    )
    return rows, columns


def fold(builder: Builder, op: Operator) -> None:
    """``F.fold``: adds the pixels of overlapping windows."""
    name = op.args[0].name
    sizes = (int(op.args[1][0]), int(op.args[1][1]))
    kernel, dilation, padding, stride = (pair(setting) for setting in op.args[2:6])
    split = builder.splits[name].owned
    if not split.is_flat_map or split.layout.map.shape != _windows(sizes, kernel, dilation, padding, stride):
        builder.refuse(
            op,
            f"folds a map of {split.layout.map.shape} positions, which does not match its settings",
            "the output of F.unfold with the same settings",
        )
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    axes = tuple(scattered(*settings) for settings in zip(sizes, stride, padding, spans, strict=True))
    reached = reach(builder, builder.opened(builder.part(name, split)), (axes[0], axes[1]))
    part, need = reached.part, reached.need
    # The local result covers more than the owned part: by how much before it, and after it.
    before = [part.y0 - (need.y0 * stride[0] - padding[0]), part.x0 - (need.x0 * stride[1] - padding[1])]
    covered = tuple((n - 1) * s + span + 1 for n, s, span in zip(need.shape, stride, spans, strict=True))
    behind = [b + n - c for b, n, c in zip(before, part.shape, covered, strict=True)]
    edges = (-before[1], behind[1], -before[0], behind[0])

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(F.fold(tensor.flatten(2), covered, kernel, dilation, 0, stride), edges)

    builder.compute(call, (reached.canvas,), op.outputs, reached.split)


def unfold_along(builder: Builder, op: Operator) -> None:
    """``Tensor.unfold``: windows along one dim; their pixels are a new last dim."""
    name = op.args[0].name
    dim, kernel, stride = op.args[1] % len(builder.shape(name)), op.args[2], op.args[3]
    input_split = builder.splits[name]
    if dim not in input_split.dims:
        split = builder.same_pixels(op, name)
        emit_on_part(builder, op, split, split)
        return
    if not input_split.has_own_dims:
        builder.refuse(
            op,
            f"takes windows along dim {dim}, which mixes rows or columns with something else",
            "either height or width",
        )
    output = builder.shape(op.first_output)
    axes = [
        _axis_of_windows(output[at], kernel, dilation=1, padding=0, stride=stride)
        if at == dim
        else Axis.shifted(output[at], 0)  # along the other axis, each pixel stays where it is
        for at in input_split.dims
    ]
    reached = reach(builder, name, (axes[0], axes[1]))
    builder.compute(lambda tensor: tensor.unfold(dim, kernel, stride), (reached.canvas,), op.outputs, reached.split)


FACTS = {
    "im2col": OperatorFacts(on_maps(unfold), keeps="nothing"),
    "col2im": OperatorFacts(one_map(fold)),
    "unfold": OperatorFacts(one_map(unfold_along), keeps="nothing"),
}
