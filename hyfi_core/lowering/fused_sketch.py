"""The sketch of a program for planning fused runs, derived from a lowering with an exchange before each window."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from hyfi_core.capture.program import Operator, Program, ValueInfo
from hyfi_core.lowering.fused_halo import Flow, Sketch
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.table import facts_of


def sketch_of(
    program: Program,
    operators: Sequence[Operator],
    splits: Mapping[str, Split],
    fusible: Collection[str],
    exits: Sequence[str],
) -> Sketch:
    """Return a program reduced to what the choice of fused runs needs: operators on maps, their layouts and sizes.

    Args:
        program: the captured model.
        operators: the operators to run.
        splits: the layout of each value.
        fusible: operators whose rules can compute margins.
        exits: values that other stages use.
    """
    readers: dict[str, int] = {}
    for op in operators:
        # Once for each operator, also for x * x.
        for name in dict.fromkeys(op.inputs):
            readers[name] = readers.get(name, 0) + 1
    flows = tuple(
        _flow(program.values, op, splits) for op in operators if op.name in fusible and _makes_maps(op, splits)
    )
    maps = {name for flow in flows for name in (*flow.takes, *flow.makes)}
    return Sketch(
        flows=flows,
        layouts={name: splits[name].layout for name in maps},
        pixel_bytes={name: _pixel_bytes(program.values[name], splits[name]) for name in maps},
        readers=readers,
        image=program.image,
        owned_only=frozenset(exits),
    )


def _makes_maps(op: Operator, splits: Mapping[str, Split]) -> bool:
    return any(name in splits for name in op.outputs if name is not None)


def _flow(values: Mapping[str, ValueInfo], op: Operator, splits: Mapping[str, Split]) -> Flow:
    """Return an operator as the sketch has it: maps, window, and work for one pixel."""
    takes = tuple(name for name in dict.fromkeys(op.inputs) if name in splits)
    makes = tuple(name for name in op.outputs if name is not None and name in splits)
    touched = sum(_pixel_bytes(values[name], splits[name]) for name in (*takes, *makes))
    facts = facts_of(op)
    # A padding or a slice is like a window of one tap: it shifts rows and columns, but computes nothing.
    if facts.window is None:
        tap = facts.tap(op, values[takes[0]].shape, splits[takes[0]]) if facts.tap is not None else None
        return Flow(op.name, takes, makes, None if tap is None else tap.window, touched_bytes=touched)
    window = facts.window(op, lambda name: values[name].shape).window
    shape = values[makes[0]].shape
    # Each value of a result is a sum over the taps and, for a product, over the inputs of its group: dim 1 of a weight.
    taps = window.y.kernel * window.x.kernel
    if facts.product:
        taps *= values[op.args[1].name].shape[1]
    # Two operations, a product and a sum, for each tap, image and channel.
    return Flow(op.name, takes, makes, window, 2.0 * taps * shape[0] * shape[1], touched)


def _pixel_bytes(info: ValueInfo, split: Split) -> int:
    sides = [side for dim, side in enumerate(info.shape) if dim not in split.dims]
    return math.prod(sides) * info.dtype.itemsize
