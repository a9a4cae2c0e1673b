"""Rules for cells: those for ranks, with slices and constant padding as part of fused runs."""

from __future__ import annotations

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.lowering.fused_taps import Tap, one_tap
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.table import RULES


def _in_runs(rule: Rule) -> Rule:
    """Return a rule that lowers slices and padding of height and width as windows of one tap, others by ``rule``."""

    def lowered(builder: Builder, op: Operator) -> None:
        name = op.args[0].name
        tap = one_tap(op, builder.shape(name), builder.splits[name])
        if tap is None:
            rule(builder, op)
        else:
            _emit_tap(builder, op, tap)

    return lowered


def _emit_tap(builder: Builder, op: Operator, tap: Tap) -> None:
    name, (output,) = op.args[0].name, op.outputs
    here, sizes = builder.splits[name], builder.shape(str(output))
    height, width = (sizes[dim] for dim in here.dims)
    split = builder.computed(op, Split(here.layout.through(tap.window, height, width), here.dims))
    canvas = builder.moved(name, tap.window.input_boxes(split.held), fill=tap.fill)
    steps = {here.dims[0]: tap.window.y.stride, here.dims[1]: tap.window.x.stride}

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(slice(None, None, steps.get(dim, 1)) for dim in range(tensor.dim()))]

    builder.compute(call, (canvas,), op.outputs, split)


CELL_RULES: dict[str, Rule] = {
    **RULES,
    **{name: _in_runs(RULES[name]) for name in ("aten.slice.Tensor", "aten.pad.default")},
}
"""Name of an operator -> its rule."""
