"""Rules for cells: those for ranks, with slices and constant padding as part of fused runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.table import OPERATORS
from hyfi_core.rules.windows.taps import Tap


def _in_runs(record: OperatorFacts) -> OperatorFacts:
    """Return the record of a padding or slice with a rule by which a fused run can compute it with margins.

    Each output of such an operator reads a single pixel, its tap: it is lowered like a window with a kernel of 1 x 1.
    Records of other operators are returned as they are.
    """
    rule, find = record.rule, record.tap
    if rule is None or find is None:
        return record

    def lowered(builder: Builder, op: Operator) -> None:
        name = op.args[0].name
        tap = find(op, builder.shape(name), builder.splits[name])
        if tap is None:  # no window of one tap: along other dims, of a flat map, or padded by other than a constant
            rule(builder, op)
        else:
            _emit_tap(builder, op, tap)

    return replace(record, rule=lowered)


def _emit_tap(builder: Builder, op: Operator, tap: Tap) -> None:
    """Emit a padding or a slice as a window of one tap, which a fused run can compute with margins."""
    name, (output,) = op.args[0].name, op.outputs
    input_split, sizes = builder.splits[name], builder.shape(str(output))
    height, width = (sizes[dim] for dim in input_split.dims)
    split = builder.with_margins(op, Split(input_split.layout.through(tap.window, height, width), input_split.dims))
    canvas = builder.moved(name, tap.window.input_boxes(split.held), fill=tap.fill)
    steps = {input_split.dims[0]: tap.window.y.stride, input_split.dims[1]: tap.window.x.stride}

    def call(tensor: torch.Tensor) -> torch.Tensor:
        # The canvas is cut and filled so that it begins with the first tap: only the strides remain.
        return tensor[tuple(slice(None, None, steps.get(dim, 1)) for dim in range(tensor.dim()))]

    builder.compute(call, (canvas,), op.outputs, split)


CELL_OPERATORS = {text: _in_runs(record) for text, record in OPERATORS.items()}
"""Text of an operator -> its record for cells."""
