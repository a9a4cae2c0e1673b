"""Slices and constant padding of height and width as windows of one tap, so that they can be part of a fused run.

x[:, :, 1:]       output i reads input i + 1    one tap, padding -1
x[:, :, ::2]      output i reads input 2 i    one tap, stride 2
pad(x, (0, 1))    output i reads input i    one tap, and one output more than there are inputs
"""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.capture.program import Operator
from hyfi_core.plan.window import AxisWindow, Window
from hyfi_core.rules.instructions import Split


@dataclass(frozen=True, slots=True)
class Tap:
    """The single input pixel that each output of an operator reads.

    Attributes:
        window: window of one tap along (y, x).
        fill: value outside of the map.
    """

    window: Window
    fill: float = 0.0


def of_slice(op: Operator, shape: tuple[int, ...], split: Split) -> Tap | None:
    """Return a slice as a window of one tap, with the step as stride; None if it is not along height or width.

    Maps whose height and width are not separate dims have none.

    Args:
        op: the slice.
        shape: shape of its first argument.
        split: split of its first argument.
    """
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(shape)
    start, stop, step = (list(op.args[2:5]) + [None] * 3)[:3]
    lines = range(shape[dim])[start:stop:step]
    if not split.has_own_dims or dim not in split.dims or not lines:
        return None
    # A window that begins later has a negative padding.
    return _tap({dim: AxisWindow(kernel=1, stride=lines.step, padding=-lines.start)}, split.dims, 0.0)


def of_pad(op: Operator, shape: tuple[int, ...], split: Split) -> Tap | None:
    """Return padding as a window of one tap; None if it is not constant, or not of height and width alone.

    Arguments as of ``of_slice``.
    """
    widths, rank = list(op.args[1]), len(shape)
    mode = op.args[2] if len(op.args) > 2 else op.kwargs.get("mode", "constant")
    value = op.args[3] if len(op.args) > 3 else op.kwargs.get("value")
    around = {rank - 1 - at: (widths[2 * at], widths[2 * at + 1]) for at in range(len(widths) // 2)}
    elsewhere = any(pair != (0, 0) for dim, pair in around.items() if dim not in split.dims)
    if not split.has_own_dims or mode != "constant" or elsewhere:
        return None
    windows = {dim: AxisWindow(kernel=1, stride=1, padding=before) for dim, (before, _) in around.items()}
    return _tap(windows, split.dims, 0.0 if value is None else float(value))


def _tap(windows: dict[int, AxisWindow], dims: tuple[int, int], fill: float) -> Tap:
    y, x = (windows.get(dim, AxisWindow(1)) for dim in dims)
    return Tap(Window(y, x), fill)
