"""Plots of a cohort as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pathology.predict.colors import class_color
from workflows.tasks.curves import (
    GRID,
    RELIABILITY_BINS,
    Array,
    RateCurve,
    confusion,
    precision_recall_curve,
    reliability,
    roc_curve,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE_INCHES = 4.3
_INSIDE = 4
"""Up to this many curves, the legend is inside the plot; with more, it would cover them."""
_LETTERS_IN_A_ROW = 36
"""Number of letters that fit below a plot; class names, each counted as long as the longest, are else rotated."""


@dataclass(frozen=True)
class Plot:
    """A plot: title, SVG element and caption."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True, eq=False)
class ScoredClass:
    """A class whose curves are drawn.

    Attributes:
        name: The class.
        color: Index of its colour.
        score: (N,) score by which the class ranks the slides.
        positive: (N,) whether each slide is of the class.
        draws: (draws, N) how often each bootstrap draw has each slide.
    """

    name: str
    color: int
    score: Array
    positive: NDArray[np.bool_]
    draws: Array


def curve_plots(
    probabilities: Array, targets: NDArray[np.int64], draws: Array, class_names: Sequence[str], shown: Sequence[int]
) -> list[Plot]:
    """Return the ROC and the precision-recall plot of the classes ``shown``, each against the rest, with bands."""
    return rate_plots([ScoredClass(class_names[k], k, probabilities[:, k], targets == k, draws) for k in shown])


def rate_plots(classes: Sequence[ScoredClass]) -> list[Plot]:
    """Return the ROC and the precision-recall plot of classes, with bands."""
    plots = []
    kinds = (
        ("ROC", roc_curve, "false positive rate", "true positive rate", "area under the curve"),
        ("Precision and recall", precision_recall_curve, "recall", "precision", "average precision"),
    )
    for title, curve_of, x_name, y_name, area_name in kinds:
        figure, axes = _figure(x_name, y_name)
        for scored in classes:
            curve = curve_of(scored.score, scored.positive, scored.draws)
            if curve is not None:
                _draw_curve(axes, curve, scored.name, class_color(scored.color))
        if title == "ROC":
            axes.plot([0, 1], [0, 1], color="#b9bec7", linewidth=0.8, linestyle="--")
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            inside = len(handles) <= _INSIDE
            corner = "lower right" if title == "ROC" else "lower left"
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2}
            axes.legend(**({"loc": corner} if inside else below), frameon=False, fontsize=9)
        caption = f"In brackets: {area_name}. Bands: 95 % intervals, bootstrap over cases."
        plots.append(Plot(title, _svg(figure), caption))
    return plots


def _draw_curve(axes: Axes, curve: RateCurve, name: str, rgb: tuple[int, int, int]) -> None:
    color = tuple(part / 255 for part in rgb)
    axes.plot(curve.x, curve.y, color=color, linewidth=1.8, label=f"{name} ({curve.area:.3f})")
    if curve.low is not None and curve.high is not None:
        axes.fill_between(GRID, curve.low, curve.high, color=color, alpha=0.16, linewidth=0)


def confusion_plot(predicted: NDArray[np.int64], targets: NDArray[np.int64], class_names: Sequence[str]) -> Plot:
    """Return the confusion matrix: counts, shaded by their fraction of the true class."""
    counts = confusion(targets, predicted, len(class_names))
    # A class without slides has an empty row, not NaN.
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure, axes = _figure("predicted", "true", limits=False)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(class_names)), class_names)
    if len(class_names) * max(map(len, class_names)) > _LETTERS_IN_A_ROW:
        axes.tick_params("x", rotation=40)
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")
    axes.set_yticks(range(len(class_names)), class_names)
    for (row, column), count in np.ndenumerate(counts):
        color = "white" if share[row, column] > 0.55 else "#1c2430"
        text = f"{count}\n{share[row, column]:.0%}"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=10 if len(class_names) < 6 else 8)
    return Plot("Confusion", _svg(figure), "Number of slides, and percentage of the true class.")


def reliability_plots(probabilities: Array, targets: NDArray[np.int64], before: Array | None) -> list[Plot]:
    """Return the reliability plot; if the probabilities were calibrated, also that ``before`` calibration, first."""
    if before is None:
        return [reliability_plot(probabilities, targets)]
    return [
        reliability_plot(before, targets, "Reliability before calibration"),
        reliability_plot(probabilities, targets, "Reliability, calibrated"),
    ]


def reliability_plot(probabilities: Array, targets: NDArray[np.int64], title: str = "Reliability") -> Plot:
    """Return the plot of accuracy over the highest probability, with bars for the number of slides."""
    confidence, right, counts = reliability(probabilities, targets)
    figure, axes = _figure("highest probability", "accuracy")
    edges = np.arange(RELIABILITY_BINS) / RELIABILITY_BINS
    width = 1 / RELIABILITY_BINS
    axes.bar(edges, counts / max(1, counts.sum()), width, align="edge", color="#dfe3ea", linewidth=0, label="slides")
    axes.plot([0, 1], [0, 1], color="#b9bec7", linewidth=0.8, linestyle="--")
    filled = counts > 0
    axes.plot(
        confidence[filled], right[filled], color="#ab1f4d", linewidth=1.6, marker="o", markersize=4.5, label="accuracy"
    )
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    caption = "Calibrated probabilities are on the diagonal. Bars: fraction of the slides."
    return Plot(title, _svg(figure), caption)


def scatter_plot(true: Array, values: Array, name: str) -> Plot:
    """Return predicted over true values; ``values``: (N, 3), each value and its interval, NaN: none."""
    figure, axes = _figure(f"{name}, true", f"{name}, predicted", limits=False)
    low, high = float(min(true.min(), values[:, 0].min())), float(max(true.max(), values[:, 0].max()))
    axes.plot([low, high], [low, high], color="#b9bec7", linewidth=0.8, linestyle="--")
    if np.isfinite(values).all():
        axes.vlines(true, values[:, 1], values[:, 2], color="#dfe3ea", linewidth=1.2)
    axes.scatter(true, values[:, 0], color="#ab1f4d", s=14, zorder=3)
    intervals = " Lines: the interval of each prediction." if np.isfinite(values).all() else ""
    return Plot("Predicted and true", _svg(figure), f"On the diagonal, both are equal.{intervals}")


@dataclass(frozen=True, eq=False)
class GroupCurve:
    """A step curve of a group with its band; ``marks``: where to put ticks."""

    label: str
    x: Array
    y: Array
    low: Array
    high: Array
    marks: Array


def group_curves_plot(title: str, x_name: str, y_name: str, curves: Sequence[GroupCurve], caption: str) -> Plot:
    """Return step curves of groups; each value holds from its x on."""
    figure, axes = _figure(x_name, y_name, limits=False)
    for number, curve in enumerate(curves):
        color = tuple(part / 255 for part in class_color(number))
        axes.step(curve.x, curve.y, where="post", color=color, linewidth=1.8, label=curve.label)
        axes.fill_between(curve.x, curve.low, curve.high, step="post", color=color, alpha=0.16, linewidth=0)
        # The step that holds at each mark.
        heights = curve.y[np.searchsorted(curve.x, curve.marks, side="right") - 1]
        axes.plot(curve.marks, heights, "|", color=color, markersize=7)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    axes.legend(loc="best", frameon=False, fontsize=9)
    return Plot(title, _svg(figure), caption)


def time_plot(
    title: str, x_name: str, y_name: str, rows: Sequence[tuple[float, float, Sequence[float]]], caption: str
) -> Plot:
    """Return AUROCs over time; ``rows``: time, AUROC, and its interval (NaN: none)."""
    figure, axes = _figure(x_name, y_name, limits=False)
    if rows:
        x, y, bounds = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
        axes.fill_between(x, bounds[:, 0], bounds[:, 1], color="#ab1f4d", alpha=0.16, linewidth=0)
        axes.plot(x, y, color="#ab1f4d", linewidth=1.8, marker="o", markersize=4.5)
    # The AUROC of chance.
    axes.axhline(0.5, color="#b9bec7", linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 1.02)
    return Plot(title, _svg(figure), caption)


def _figure(x_name: str, y_name: str, limits: bool = True) -> tuple[Any, Any]:
    """Return a figure that needs no display, and its axes; with ``limits``, both go from 0 to 1."""
    # Not pyplot, which keeps every figure until it is closed, and may look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIDE_INCHES, SIDE_INCHES), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    if limits:
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(-0.01, 1.02)
        axes.set_aspect("equal")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    """Return the figure as an ``svg`` element without external fonts."""
    import matplotlib

    text = io.StringIO()
    # Keep text as text: smaller, and the browser can choose the font.
    # A fixed salt and no date: the same numbers give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hyfi"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    document = text.getvalue()
    return document[document.index("<svg") :]
