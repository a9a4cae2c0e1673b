"""``RUN/curves.html``: charts of a run in one self-contained file."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from data.files import write_atomically

Point = tuple[float, float]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 200, 64, 24, 8
_MAX_POINTS = 1000
_COLOURS = ("#1f6feb", "#d1662b", "#2f8f4e", "#8957e5", "#b3366b", "#6e7781")
_LOSS, _SPEED = "loss", "images_per_second"
_ATTENTION = ("attention_peak", "effective_tiles")
_SHARES = ("auroc", "balanced accuracy", "accuracy", "f1", "quadratic kappa", "calibration error")
_AT_MOST_1 = {*_SHARES, "concordance", "uno concordance", "time auroc", "brier"}
_NO_METRIC = {"kind", "step", "epoch", "slides", "cases", "loss"}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em; color: #1f2328 }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 1.5em }}
h2 {{ font-size: 1em; margin: 0 0 .3em }} figure {{ margin: 0 }} svg {{ width: 100%; height: auto }}
text {{ font-size: 11px; fill: #57606a }} .axis {{ stroke: #d0d7de }}
.key {{ display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }}
</style></head>
<body><h1>{title}</h1><p>{summary}</p><main>
{charts}
</main></body></html>
"""


@dataclass(frozen=True)
class RunCurve:
    """One line of a chart: its name and its points (step, value), steps rising."""

    name: str
    points: tuple[Point, ...]


def write_curves(path: Path, title: str, records: Sequence[Mapping[str, Any]], unit: str = "images") -> None:
    """Write the page of a run from the records of its ``metrics.jsonl``, atomically.

    Args:
        path: The page.
        title: Title of the page.
        records: The records of ``metrics.jsonl``.
        unit: What the speed counts, see `workflows.training.throughput.unit_of`.

    Raises:
        OSError: The file cannot be written.
    """
    # backslashreplace: a folder's name that is not UTF-8 has surrogates, which UTF-8 cannot encode.
    write_atomically(path, curves_page(title, records, unit).encode("utf-8", "backslashreplace"))


def curves_page(title: str, records: Sequence[Mapping[str, Any]], unit: str = "images") -> str:
    """Return the page as HTML: loss, learning rate, speed and attention of training, and each validation metric."""
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    charts = {
        "loss": [RunCurve("training", _points(train, _LOSS)), RunCurve("validation", _points(validation, _LOSS))],
        "learning rate": [RunCurve("training", _points(train, "lr"))],
        f"{unit} per second": [RunCurve("training", _points(train, _SPEED))],
        **{name.replace("_", " "): [RunCurve("training", _points(train, name))] for name in _ATTENTION},
    }
    for name in _metrics(validation):
        charts[name.replace("_", " ")] = [RunCurve("validation", _points(validation, name))]
    shown = [_chart(name, [c for c in curves if c.points]) for name, curves in charts.items()]
    return _PAGE.format(
        title=html.escape(title), summary=_summary(train, validation), charts="\n".join(filter(None, shown))
    )


def _metrics(validation: Iterable[Mapping[str, Any]]) -> list[str]:
    names = {k: None for record in validation for k, v in record.items() if isinstance(v, float)}
    return [name for name in names if name not in _NO_METRIC]


def _points(records: Iterable[Mapping[str, Any]], name: str) -> tuple[Point, ...]:
    """Return the defined (step, value); long curves are reduced to ``_MAX_POINTS`` means over consecutive steps."""
    points = [(float(r["step"]), float(r[name])) for r in records if isinstance(r.get(name), (int, float))]
    points = [point for point in points if math.isfinite(point[1])]
    # Points of one mean; at least 1, because without points a step of 0 would be no range.
    size = max(1, math.ceil(len(points) / _MAX_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple((fmean(step for step, _ in group), fmean(value for _, value in group)) for group in groups)


def _summary(train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]) -> str:
    if not train:
        return "no step yet"
    hours = sum(record.get("seconds") or 0.0 for record in train) / 3600
    spent = f"{hours:.2f} h" if hours >= 1 else f"{60 * hours:.1f} min"
    return f"{train[-1]['step']} steps in {spent} of training, {len(validation)} validations"


def _chart(name: str, curves: Sequence[RunCurve]) -> str:
    """Return one figure with its axes; empty without data."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    (x0, x1), (y0, y1) = _range([x for x, _ in points]), _range([y for _, y in points])
    if name in _AT_MOST_1 and y0 < 1.0:  # rounding may give 1.0000000000000002: an axis from 1 to 1 has no length
        # The margin around a constant would show values beyond the metric's largest.
        y1 = min(y1, 1.0)

    def point_text(point: Point) -> str:
        x = _LEFT + (point[0] - x0) / (x1 - x0) * (_WIDTH - _LEFT - 8)
        # y of SVG grows downwards.
        y = _TOP + (y1 - point[1]) / (y1 - y0) * (_HEIGHT - _BOTTOM - _TOP)
        return f"{x:.1f},{y:.1f}"

    lines, keys = [], []
    for curve, colour in zip(curves, _COLOURS, strict=False):
        drawn = " ".join(map(point_text, curve.points))
        lines.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        # Dots show single validations; on longer curves they would hide the line.
        if len(curve.points) <= 60:
            dots = (point_text(point).split(",") for point in curve.points)
            lines += [f'<circle cx="{x}" cy="{y}" r="2.4" fill="{colour}"/>' for x, y in dots]
        keys.append(f'<span class="key" style="background:{colour}"></span>{html.escape(curve.name)}')
    axes = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>' for y in (_TOP, _HEIGHT - _BOTTOM)] + [
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{y1:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">{y0:.3g}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {x0:.0f}</text>',
        f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{x1:.0f}</text>',
    ]
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(axes + lines)}</svg>'
    return f"<figure><h2>{html.escape(name)}{''.join(keys)}</h2>{picture}</figure>"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: the lowest and the highest value; around a constant, some room on both sides."""
    low, high = min(values), max(values)
    margin = max(0.5, abs(high) / 10)  # 0.5 vanishes when added to a large float
    return (low, high) if high > low else (low - margin, high + margin)
