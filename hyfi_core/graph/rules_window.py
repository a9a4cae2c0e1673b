"""Rules for windows: convolutions and pools. Each needs the halo that its window reaches into.

    2 x 1 ranks, 3 x 3 kernel, stride 1, padding 1

    rank 0 needs   ┌───────┐ one row of padding (the map ends here: a fill value)
                   │ owned │
                   └───────┘ one row of rank 1 (the halo)

Along an axis with one rank the native padding of the operator serves and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.graph.instructions import Split
from hyfi_core.graph.lowering import Lowering, bound, renamed
from hyfi_core.graph.program import Operator
from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.window import Window, Window1d


@dataclass(frozen=True)
class _Sliding:
    """A window operator on a grid: what each rank needs, and the padding that is left to the native call."""

    layout: Layout
    need: tuple[Box, ...]
    native: tuple[int, int]


def _sliding(
    lowering: Lowering, name: str, window: Window, output: tuple[int, int], symmetric: tuple[bool, bool]
) -> _Sliding:
    """Lay a window operator's output out and say what each rank needs of the input.

    Args:
        lowering: the program under way.
        name: the input.
        window: along both axes.
        output: (height, width) of the whole output.
        symmetric: axes whose padding the native call can do itself, being the same at both ends.
    """
    have = lowering.splits[name].layout
    layout = have.through(window, *output)
    native_y = len(have.rows) == 2 and symmetric[0]
    native_x = len(have.columns) == 2 and symmetric[1]
    need = []
    for part in layout.parts:
        box = window.input_box(part)
        if not box.empty and native_y:
            box = Box(0, have.height, box.x0, box.x1)
        if not box.empty and native_x:
            box = Box(box.y0, box.y1, 0, have.width)
        need.append(box)
    return _Sliding(layout, tuple(need), (window.y.padding if native_y else 0, window.x.padding if native_x else 0))


def _native(lowering: Lowering, op: Operator) -> bool:
    """Emit the operator as it is where one rank owns the whole map; whether that was so."""
    output = op.outputs[0]
    if lowering.grid != (1, 1) or output is None:
        return False
    x = op.args[0].name
    function, inputs = bound(renamed(op, {x: lowering.part(x, lowering.splits[x])}))
    height, width = lowering.shape(output)[2:]
    lowering.compute(function, inputs, op.outputs, Split(Layout.even(height, width, (1, 1))))
    return True


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def conv2d(lowering: Lowering, op: Operator) -> None:
    """Convolution: any kernel, stride, dilation and groups; padding as numbers, "same" or "valid"."""
    if _native(lowering, op):
        return
    x, weight, bias, stride, padding, dilation, groups = _arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    kernel = lowering.shape(weight.name)[2:]
    stride, dilation = _pair(stride), _pair(dilation)
    if isinstance(padding, str):
        both = [(d * (k - 1) if padding == "same" else 0) for k, d in zip(kernel, dilation, strict=True)]
        first, symmetric = (both[0] // 2, both[1] // 2), (both[0] % 2 == 0, both[1] % 2 == 0)
    else:
        first, symmetric = _pair(padding), (True, True)
    window = Window(*(Window1d(k, s, p, d) for k, s, p, d in zip(kernel, stride, first, dilation, strict=True)))
    output = op.outputs[0]
    assert output is not None
    plan = _sliding(lowering, x.name, window, lowering.shape(output)[2:], symmetric)  # type: ignore[arg-type]
    canvas = lowering.moved(x.name, plan.need)

    def call(tensor: torch.Tensor, kernel: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return F.conv2d(tensor, kernel, rest[0] if rest else None, stride, plan.native, dilation, groups)

    inputs = (canvas, weight.name) if bias is None else (canvas, weight.name, bias.name)
    lowering.compute(call, inputs, op.outputs, Split(plan.layout))


def max_pool2d(lowering: Lowering, op: Operator) -> None:
    """Maximum over windows; outside the map is -inf, so that it never wins."""
    if _native(lowering, op):
        return
    x, kernel, stride, padding, dilation, ceil_mode = _arguments(op.args, ([], [0, 0], [1, 1], False), 2)
    kernel, padding, dilation = _pair(kernel), _pair(padding), _pair(dilation)
    stride = _pair(stride or kernel)
    window = Window(*(Window1d(k, s, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)))
    output = op.outputs[0]
    assert output is not None
    native = (not ceil_mode, not ceil_mode)  # a window that hangs over the end needs the fill value there
    plan = _sliding(lowering, x.name, window, lowering.shape(output)[2:], native)  # type: ignore[arg-type]
    canvas = lowering.moved(x.name, plan.need, fill=-torch.inf)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(tensor, kernel, stride, plan.native, dilation)

    lowering.compute(call, (canvas,), op.outputs, Split(plan.layout))


def avg_pool2d(lowering: Lowering, op: Operator) -> None:
    """Mean over windows: sums over the window, divided by the true count of each."""
    if _native(lowering, op):
        return
    x, kernel, stride, padding, _, include_pad, divisor = _arguments(op.args, ([], [0, 0], False, True, None), 2)
    kernel, padding = _pair(kernel), _pair(padding)
    stride = _pair(stride or kernel)
    window = Window(*(Window1d(k, s, p) for k, s, p in zip(kernel, stride, padding, strict=True)))
    output = op.outputs[0]
    assert output is not None
    plan = _sliding(lowering, x.name, window, lowering.shape(output)[2:], (False, False))  # type: ignore[arg-type]
    canvas = lowering.moved(x.name, plan.need)
    part = plan.layout.parts[lowering.rank]
    have = lowering.splits[x.name].layout.map
    rows = _counts(window.y, part.y0, part.y1, have.height, padding[0] if include_pad else 0)
    columns = _counts(window.x, part.x0, part.x1, have.width, padding[1] if include_pad else 0)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = F.avg_pool2d(tensor, kernel, stride, divisor_override=1)
        counts = tensor.new_tensor(rows)[:, None] * tensor.new_tensor(columns)[None, :]
        return sums / (divisor or counts)

    lowering.compute(call, (canvas,), op.outputs, Split(plan.layout))


def _counts(window: Window1d, start: int, stop: int, length: int, beyond: int) -> list[int]:
    """Return how many positions of the map, and ``beyond`` either end of it, each output's window covers."""
    counts = []
    for output in range(start, stop):
        first, last = window.input_interval(output, output + 1)
        counts.append(max(1, min(last, length + beyond) - max(first, -beyond)))
    return counts


def _arguments(args: tuple[Any, ...], defaults: Sequence[Any], required: int) -> tuple[Any, ...]:
    """Return positional arguments with those left out filled in."""
    return (*args, *defaults[len(args) - required :])
