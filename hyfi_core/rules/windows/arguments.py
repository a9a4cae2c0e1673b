"""The windows of operators, from their arguments; used by rules and for planning fused runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyfi_core.capture.program import Operator
from hyfi_core.plan.window import AxisWindow, Window
from hyfi_core.rules.calls import arguments, pair

ShapeOf = Callable[[str], tuple[int, ...]]


_Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sliding:
    """The window of one operator.

    Attributes:
        window: along (y, x).
        symmetric: whether the padding is the same at both ends, along (y, x): the native call can then pad.
    """

    window: Window
    symmetric: tuple[bool, bool]


def conv2d(op: Operator, shape: ShapeOf) -> Sliding:
    """Return the window of a convolution; ``shape`` returns the shape of a value."""
    _, weight, _, stride, padding, dilation, _ = arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    kernel, stride, dilation = shape(weight.name)[2:], pair(stride), pair(dilation)
    if isinstance(padding, str):
        amounts = [(d * (k - 1) if padding == "same" else 0) for k, d in zip(kernel, dilation, strict=True)]
        # "same" with an even kernel: PyTorch pads the odd one at the end.
        first, symmetric = (amounts[0] // 2, amounts[1] // 2), (amounts[0] % 2 == 0, amounts[1] % 2 == 0)
    else:
        first, symmetric = pair(padding), (True, True)
    return Sliding(_window(kernel, stride, first, dilation), symmetric)


def max_pool2d(op: Operator, shape: ShapeOf) -> Sliding:
    """Return the window of a max pool; with ``ceil_mode`` it may extend beyond the padding."""
    _, kernel, stride, padding, dilation, ceil_mode = arguments(op.args, ([], [0, 0], [1, 1], False), 2)
    window = _window(pair(kernel), pair(stride or kernel), pair(padding), pair(dilation))
    return Sliding(window, (not ceil_mode, not ceil_mode))


def misses_map(op: Operator, window: Window, shape: ShapeOf) -> bool:
    """Return whether an output of a pool reads nothing of its map, so that its maximum is -inf."""
    inputs, outputs = shape(op.args[0].name)[-2:], shape(op.first_output)[-2:]
    return window.y.misses(inputs[0], outputs[0]) or window.x.misses(inputs[1], outputs[1])


def avg_pool2d(op: Operator, shape: ShapeOf) -> Sliding:
    """Return the window of an average pool; the native call never pads, because its counts would be wrong."""
    _, kernel, stride, padding, *_ = arguments(op.args, ([], [0, 0], False, True, None), 2)
    return Sliding(_window(pair(kernel), pair(stride or kernel), pair(padding), (1, 1)), (False, False))


def _window(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
    return _known_window(tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))


@lru_cache(maxsize=256)  # networks have few different windows, and planning needs each many times
def _known_window(kernel: _Sizes, stride: _Sizes, padding: _Sizes, dilation: _Sizes) -> Window:
    return Window(*(AxisWindow(k, s, p, d) for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)))
