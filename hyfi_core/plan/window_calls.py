"""A linear sliding window, such as a convolution, as separate calls on the own part and on each received strip.

The results are added: each call takes the pixels of the other calls as zeros. So only the few outputs that read a strip
have to wait for its message.

    3 taps, stride 1        own part       strip
    input             … 4 5 6 7           8          own call: every output, zeros beyond 7
    output            … 4 5 6 7           └──▶ 7     strip call: only output 7, through its last tap
"""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Interval
from hyfi_core.plan.transfer import Transfer
from hyfi_core.plan.window import AxisWindow, Window

_OWN_TO_STRIPS = 4
"""Smallest ratio of own to received pixels for which separate calls are faster."""


@dataclass(frozen=True, slots=True)
class StripCall:
    """A call on a received strip that gives its contribution to the outputs that it reaches.

    Attributes:
        outputs: box of the outputs whose windows touch it.
        taps: box of the taps that read it.
        inputs: box read by these taps for these outputs; a call on it without padding gives ``outputs``.
    """

    outputs: Box
    taps: Box
    inputs: Box


@dataclass(frozen=True, slots=True)
class OwnCall:
    """A call of PyTorch's operator on a rank's own part that gives its part of the output, with zeros outside.

    Attributes:
        start: (y, x) of the first owned pixel that it reads.
        padding: (y, x), the same at both ends.
    """

    start: tuple[int, int]
    padding: tuple[int, int]


def strip_call(window: Window, strip: Box, outputs: Box) -> StripCall | None:
    """Return the call on a strip; None if no output of the rank reads the strip."""
    y = _strip_along(window.y, (strip.y0, strip.y1), (outputs.y0, outputs.y1))
    x = _strip_along(window.x, (strip.x0, strip.x1), (outputs.x0, outputs.x1))
    if y is None or x is None:
        return None
    return StripCall(*(Box(*along_y, *along_x) for along_y, along_x in zip(y, x, strict=True)))


def own_call(window: Window, have: Box, outputs: Box) -> OwnCall | None:
    """Return the native call on a rank's own part, None if no symmetric padding gives exactly its outputs."""
    y = _own_along(window.y, (have.y0, have.y1), (outputs.y0, outputs.y1))
    x = _own_along(window.x, (have.x0, have.x1), (outputs.x0, outputs.x1))
    if y is None or x is None:
        return None
    return OwnCall((y[0], x[0]), (y[1], x[1]))


def _strip_along(window: AxisWindow, strip: Interval, outputs: Interval) -> tuple[Interval, Interval, Interval] | None:
    """Return (outputs, taps, inputs) of a ``StripCall`` along one axis; None if no output reads the strip."""
    # -(-a // b) rounds up: the first output whose last tap reaches the strip.
    first = max(outputs[0], -((window.extent - 1 - window.padding - strip[0]) // window.stride))
    # Rounded down: the last output whose first tap is not behind the strip.
    last = min(outputs[1] - 1, (strip[1] - 1 + window.padding) // window.stride)
    taps = [tap for tap in range(window.kernel) if _is_read(window, tap, strip, (first, last + 1))]
    if not taps:
        return None
    begin = first * window.stride - window.padding
    end = last * window.stride - window.padding
    # Only between the first and the last tap that read the strip: other taps would read pixels of other calls.
    inputs = (begin + taps[0] * window.dilation, end + taps[-1] * window.dilation + 1)
    return (first, last + 1), (taps[0], taps[-1] + 1), inputs


def _is_read(window: AxisWindow, tap: int, strip: Interval, outputs: Interval) -> bool:
    """Whether some output reads the strip through this tap."""
    shift = window.padding - tap * window.dilation  # output n reads position n * stride - shift
    # Rounded up: the first output that reads at the beginning of the strip, or behind it.
    first = max(outputs[0], -((-strip[0] - shift) // window.stride))
    return first < outputs[1] and first * window.stride - shift < strip[1]


def _own_along(window: AxisWindow, have: Interval, outputs: Interval) -> tuple[int, int] | None:
    """Return (start, padding) of an ``OwnCall`` along one axis; None if none gives exactly these outputs."""
    count = outputs[1] - outputs[0]
    before = have[0] - outputs[0] * window.stride + window.padding  # positions of the first window before the part
    start, padding = max(0, -before), max(0, before)
    # As PyTorch counts outputs: (length + 2 padding - extent) // stride + 1.
    room = have[1] - have[0] - start + 2 * padding - window.extent
    return (start, padding) if count > 0 and room >= 0 and room // window.stride + 1 == count else None


def inner_outputs(window: Window, have: Box, map_box: Box, outputs: Box) -> Box:
    """Return the outputs of a rank whose windows, within the map, read only its own part; may be empty."""
    y = _inner_along(window.y, (have.y0, have.y1), map_box.y1, (outputs.y0, outputs.y1))
    x = _inner_along(window.x, (have.x0, have.x1), map_box.x1, (outputs.x0, outputs.x1))
    return Box(*y, *x)


def faster_apart(transfer: Transfer) -> bool:
    """Whether separate calls on own part and strips are faster than one call on a padded copy of all of them.

    If strips are large relative to the own part, many small calls cost more than the copy.
    """
    return transfer.have.area >= _OWN_TO_STRIPS * max(1, transfer.received_px)


def _inner_along(window: AxisWindow, have: Interval, length: int, outputs: Interval) -> Interval:
    """Return those of the outputs of this rank that need no pixel of its neighbours, along one axis; maybe none.

    ``have``: pixels of this rank; ``length``: those of the whole map.
    """
    # Taps outside of the map read padding, which every rank has.
    first, last = outputs
    while first < last and max(0, window.input_interval(first, first + 1)[0]) < have[0]:
        first += 1
    while first < last and min(length, window.input_interval(last - 1, last)[1]) > have[1]:
        last -= 1
    return first, last
