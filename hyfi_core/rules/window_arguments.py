"""The windows of operators, from their arguments; for rules and for planning fused runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hyfi_core.capture.program import Operator
from hyfi_core.plan.window import AxisWindow, Window

Shape = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sliding:
    """The window of one operator.

    Attributes:
        window: along (y, x).
        symmetric: along which of both the native call can do the padding, being the same at both ends.
        fill: value outside of the map.
    """

    window: Window
    symmetric: tuple[bool, bool]
    fill: float = 0.0


def pair(value: Any) -> tuple[int, int]:
    """Return (y, x) of a setting that is given once or for both."""
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def arguments(args: tuple[Any, ...], defaults: Sequence[Any], required: int) -> tuple[Any, ...]:
    """Return positional arguments with those left out filled in."""
    return (*args, *defaults[len(args) - required :])


def conv2d(op: Operator, shape: Shape) -> Sliding:
    """Return the window of a convolution; ``shape`` tells the weight's."""
    _, weight, _, stride, padding, dilation, _ = arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    kernel, stride, dilation = shape(weight.name)[2:], pair(stride), pair(dilation)
    if isinstance(padding, str):
        both = [(d * (k - 1) if padding == "same" else 0) for k, d in zip(kernel, dilation, strict=True)]
        first, symmetric = (both[0] // 2, both[1] // 2), (both[0] % 2 == 0, both[1] % 2 == 0)
    else:
        first, symmetric = pair(padding), (True, True)
    return Sliding(_window(kernel, stride, first, dilation), symmetric)


def max_pool2d(op: Operator, shape: Shape) -> Sliding:
    """Return the window of a maximum pool; one that hangs over the end needs the fill value there."""
    _, kernel, stride, padding, dilation, ceil_mode = arguments(op.args, ([], [0, 0], [1, 1], False), 2)
    window = _window(pair(kernel), pair(stride or kernel), pair(padding), pair(dilation))
    return Sliding(window, (not ceil_mode, not ceil_mode), float("-inf"))


def avg_pool2d(op: Operator, shape: Shape) -> Sliding:
    """Return the window of a mean pool; its padding is never left to the native call, whose counts would be wrong."""
    _, kernel, stride, padding, *_ = arguments(op.args, ([], [0, 0], False, True, None), 2)
    return Sliding(_window(pair(kernel), pair(stride or kernel), pair(padding), (1, 1)), (False, False))


def _window(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
    return Window(*(AxisWindow(k, s, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)))


WINDOWS: dict[str, Callable[[Operator, Shape], Sliding]] = {
    "aten.conv2d.default": conv2d,
    "aten.conv2d.padding": conv2d,
    "aten.max_pool2d.default": max_pool2d,
    "aten.avg_pool2d.default": avg_pool2d,
}
"""Text form of an operator -> what reads its window."""
