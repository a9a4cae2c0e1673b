"""The section of a cohort page for slides with labels: plots, tables and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workflows.tasks.plots import Plot


@dataclass(frozen=True)
class PageTable:
    """A table of a page; if ``folded``, only its caption is visible until a click."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


@dataclass(frozen=True)
class MetricNumber:
    """A metric and its 95 % interval; None: undefined."""

    value: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class PageSection:
    """Plots and tables of the labelled slides.

    Attributes:
        metrics: Name and formatted value, with its interval, of each metric.
        plots: The plots.
        tables: Further tables.
        errors: Index of a slide -> size of its error, 0 or more; correctly predicted slides are left out.
        numbers: Value and 95 % interval of each metric, under its name in JSON.
    """

    metrics: Sequence[tuple[str, str]]
    plots: Sequence[Plot]
    tables: Sequence[PageTable] = ()
    errors: Mapping[int, float] = field(default_factory=dict)
    numbers: Mapping[str, MetricNumber] = field(default_factory=dict)


def shown_metric(name: str, value: float | None, bounds: Sequence[float] | None) -> tuple[str, str]:
    """Return a row of the page's metrics: ``0.812 (0.700 – 0.901)``; few cases may define no metric, or no interval."""
    interval = f"{bounds[0]:.3f} – {bounds[1]:.3f}" if bounds else "interval undefined"
    return name.replace("_", " "), "not defined" if value is None else f"{value:.3f} ({interval})"


def metric_numbers(
    values: Mapping[str, float | None], bounds: Mapping[str, Sequence[float] | None]
) -> dict[str, MetricNumber]:
    """Return metrics with their intervals."""
    return {
        name: MetricNumber(value, None if (interval := bounds[name]) is None else (interval[0], interval[1]))
        for name, value in values.items()
    }
