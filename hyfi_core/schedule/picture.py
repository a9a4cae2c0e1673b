"""A trace drawn as SVG.

rank 0  ┃ 0 ┃ 1 ┃       ┃   0   ┃   1   ┃     gang actions, with the number of the micro-batch
        ╺━╸ ╺━╸                 ╺━━━━━━╸      messages, reductions and the rest
        0       2       4       6       8 s
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from hyfi_core.errors import RequestError
from hyfi_core.schedule.action import COMPUTE, Action
from hyfi_core.schedule.trace import TraceEvent

# Colour-blind readers can tell them apart (Okabe and Ito): blue for direction 0, orange for 1; backwards are darker.
# In a divided backward, the part that others wait for has the colour of a backward, and the other is the lightest.
_COMPUTE = {("F", 0): "#9ccbe8", ("B", 0): "#2f7fb5", ("I", 0): "#2f7fb5", ("W", 0): "#d4e3ec"}
_COMPUTE |= {("F", 1): "#f6cf7f", ("B", 1): "#d98a00", ("I", 1): "#d98a00", ("W", 1): "#f7ead0"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradient"}
_OTHER = {"REDUCE": "#009e73", "SEND": "#999999"}
_REST = "#cc79a7"
_LEFT_PX, _TOP_PX, _RIGHT_PX, _BOTTOM_PX = 70, 56, 20, 30
_ROW_PX, _BOX_PX, _STRIP_PX, _DIGIT_PX = 40, 24, 6, 7


def draw(events: Iterable[TraceEvent], title: str, width_px: int = 1200) -> str:
    """Return an SVG picture of a trace, time from left to right, one row for each rank from 0 to the last.

    Args:
        events: simulated or measured.
        title: printed above.
        width_px: width of the whole picture.

    Raises:
        ValueError: there is no event.
    """
    events = sorted(events, key=lambda event: (event.rank, event.start_s))
    if not events:
        raise ValueError("a picture needs at least one event")
    first_s = min(event.start_s for event in events)
    # A single event without length must not divide by zero.
    span_s = max(event.end_s for event in events) - first_s or 1.0
    ranks = 1 + max(event.rank for event in events)
    px_per_s = (width_px - _LEFT_PX - _RIGHT_PX) / span_s
    height_px = _TOP_PX + ranks * _ROW_PX + _BOTTOM_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px}" '
        f'viewBox="0 0 {width_px} {height_px}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width_px}" height="{height_px}" fill="white"/>',
        _text(_LEFT_PX, 18, title, size=14, anchor="start"),
        *_legend(events),
    ]
    for rank in range(ranks):
        y = _TOP_PX + rank * _ROW_PX
        parts.append(_text(_LEFT_PX - 8, y + _BOX_PX / 2 + 4, f"rank {rank}", anchor="end"))
        parts.append(_rect(_LEFT_PX, y, width_px - _LEFT_PX - _RIGHT_PX, _BOX_PX, "#f3f3f3"))
    parts += [_event(event, _LEFT_PX + (event.start_s - first_s) * px_per_s, px_per_s) for event in events]
    parts += _axis(span_s, px_per_s, _TOP_PX + ranks * _ROW_PX)
    return "\n".join([*parts, "</svg>", ""])


def _event(event: TraceEvent, x: float, px_per_s: float) -> str:
    """Return the SVG of an event: a box for a computation, a strip below it for a message."""
    # At least half a pixel, so that short messages can be seen.
    width = max((event.end_s - event.start_s) * px_per_s, 0.5)
    y = _TOP_PX + event.rank * _ROW_PX
    hint = f"{event.name}: {event.start_s:g} to {event.end_s:g} s"
    if event.kind not in COMPUTE:
        return _rect(x, y + _BOX_PX + 2, width, _STRIP_PX, _colour(event), hint)
    label = _label(event)
    box = _rect(x, y, width, _BOX_PX, _colour(event), hint)
    return box + _text(x + width / 2, y + _BOX_PX / 2 + 4, label) if _DIGIT_PX * len(label) <= width else box


def _action(event: TraceEvent) -> Action | None:
    """Return the action in an event's name, None for other names in measured traces."""
    try:
        return Action.parse(event.name)
    except RequestError:
        return None


def _label(event: TraceEvent) -> str:
    action = _action(event)
    return "" if action is None or action.microbatch is None else str(action.microbatch)


def _colour(event: TraceEvent) -> str:
    if event.kind in COMPUTE:
        action = _action(event)
        return _COMPUTE[event.kind, 0 if action is None else action.direction]
    return _OTHER.get(event.kind.split("_")[0], _REST)


def _legend(events: Sequence[TraceEvent]) -> list[str]:
    """Return a coloured box and a label for each type of event in the trace."""
    names = {colour: f"{_NAMES[verb]}, direction {d}" for (verb, d), colour in _COMPUTE.items()}
    names |= {_OTHER["SEND"]: "send", _OTHER["REDUCE"]: "reduce", _REST: "other"}
    used = {_colour(event) for event in events}
    parts, x = [], float(_LEFT_PX)
    for colour, name in names.items():
        if colour in used:
            parts += [_rect(x, 30, 12, 12, colour), _text(x + 18, 40, name, anchor="start")]
            x += 40 + 6.5 * len(name)
    return parts


def _axis(span_s: float, px_per_s: float, y: float) -> list[str]:
    """Return the labels of the time axis: 6 to 13, from 0, at multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(span_s / 5))
    # ``power`` is not compared, because it may be too large by rounding: log10 of a number just below 0.001 is -3.
    step_s = max((step * power for step in (2, 5) if step * power <= span_s / 5), default=power)
    # 1e-9: a quotient of 5 may come out as 4.999…, and the last label would be missing.
    ticks_s = [index * step_s for index in range(int(span_s / step_s + 1e-9) + 1)]
    labels = [f"{tick_s:g}" for tick_s in ticks_s]
    labels[-1] += " s"
    places = (_LEFT_PX + tick_s * px_per_s for tick_s in ticks_s)
    return [_text(x, y + 14, label) for x, label in zip(places, labels, strict=True)]


def _rect(x: float, y: float, width: float, height: float, fill: str, hint: str = "") -> str:
    line = ' stroke="white" stroke-width="1"' if hint else ""
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:g}" fill="{fill}"{line}>{title}</rect>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "middle") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
