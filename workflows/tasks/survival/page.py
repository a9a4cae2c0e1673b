"""The section of a cohort page for survival: Kaplan–Meier curves of the predicted groups, AUROC over time, metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from workflows.tasks.bootstrap import measured, resampled
from workflows.tasks.cases import members_of
from workflows.tasks.curves import Array
from workflows.tasks.page_section import PageSection, PageTable, metric_numbers, shown_metric
from workflows.tasks.plots import GroupCurve, Plot, group_curves_plot, time_plot
from workflows.tasks.survival.metrics import (
    kaplan_meier,
    life_table,
    log_rank,
    probability_uncensored,
    survival_metrics,
    time_areas,
)
from workflows.tasks.survival.readout import HIGH, LOW

_Z = 1.959964
"""Of a normal distribution, 95 % lie within this many standard deviations."""


def survival_section(
    values: Array,
    targets: torch.Tensor,
    draws: Array,
    times: tuple[float, ...],
    cutoff: float | None,
    columns: Sequence[str],
    metrics: Sequence[str],
) -> PageSection:
    """Return plots and tables of N labelled slides.

    Args:
        values: (N, 1 + times) risk and probability to survive each time, NaN: unknown.
        targets: (N, 2) time, event.
        draws: (draws, N) how often each bootstrap draw has each slide.
        times: The times of these probabilities.
        cutoff: The risk between the low and the high group; None: the median of these slides.
        columns: Names of the two columns of the target.
        metrics: Names of the metrics.
    """
    risks, counts = torch.from_numpy(np.ascontiguousarray(values[:, 0])), torch.from_numpy(draws)
    survival = torch.from_numpy(np.ascontiguousarray(values[:, 1:]))
    curves = survival if bool(survival.isfinite().all()) else None

    def metrics_of_draws(block: torch.Tensor) -> dict[str, torch.Tensor]:
        return survival_metrics(risks, curves, targets, times, block)

    # Of the slides, each once; the draws give their intervals.
    once = measured(metrics_of_draws, len(risks))
    bounds = resampled(metrics_of_draws, metrics, counts)
    shown = [shown_metric(name, value, bounds[name]) for name, value in once.items()]
    case_risks, case_targets = _by_case(risks, targets, draws)
    middle = float(case_risks.median()) if cutoff is None else cutoff
    high = case_risks > middle
    p = log_rank(case_targets[:, 0], case_targets[:, 1], high)
    shown.append(("log-rank p of the risk groups, by case", "not defined" if p is None else f"{p:.2g}"))
    plots = [_curves(case_targets, high, p, columns[0], at_own_median=cutoff is None)]
    return PageSection(
        shown,
        [*plots, _areas(risks, targets, times, counts, columns[0])],
        [_groups_table(case_targets, high), _horizon_table(risks, targets, times, curves)],
        numbers=metric_numbers(once, bounds),
    )


def _by_case(risks: torch.Tensor, targets: torch.Tensor, draws: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean risk and the latest target of each case; slides of a case are equally often in every draw."""
    # A page has no names of cases here: equal columns of draws tell which slides are of one case.
    of_case = np.unique(draws, axis=1, return_inverse=True)[1].reshape(-1)
    members = members_of(torch.from_numpy(of_case))
    latest = [int(indices[targets[indices, 0].argmax()]) for indices in members]
    return torch.stack([risks[indices].mean() for indices in members]), targets[latest]


def _curves(targets: torch.Tensor, high: torch.Tensor, p: float | None, name: str, *, at_own_median: bool) -> Plot:
    """Return the Kaplan–Meier curves of both risk groups.

    Args:
        targets: (N, 2) time and event of each case.
        high: (N,) whether its risk is high.
        p: Probability by the log-rank test; None: not tested.
        name: Name of the time axis.
        at_own_median: Whether the median of these cases divides the groups; else it is that of the validation slides.
    """
    curves = []
    for label, members in ((LOW, ~high), (HIGH, high)):
        if bool(members.any()):
            curves.append(_curve(targets[members], f"{label} ({int(members.sum())})"))
    how = "the median of these cases" if at_own_median else "the median of the validation slides"
    text = "" if p is None else f" Log-rank: p = {p:.2g}."
    caption = f"Groups by the predicted risk, divided at {how}. Bands: 95 %.{text} Ticks: censored."
    return group_curves_plot("Kaplan–Meier by predicted risk", name, "probability of survival", curves, caption)


def _curve(targets: torch.Tensor, label: str) -> GroupCurve:
    """Return a Kaplan–Meier curve with Greenwood's intervals of log(−log S), which stay within 0 and 1."""
    times, events = targets.unbind(1)
    once = torch.ones(1, len(times), dtype=torch.float64)
    distinct, curve = kaplan_meier(times, events, once)
    _, deaths, censored, at_risk = (part.squeeze(0) for part in life_table(times, events, once))
    # log(−log S) needs 0 < S < 1; the ends are replaced below.
    value = curve[0].clamp(1e-12, 1 - 1e-12)
    variance = (deaths / (at_risk * (at_risk - deaths)).clamp(min=1e-12)).cumsum(0) / value.log() ** 2
    half = _Z * variance.sqrt()
    low, high = (value ** (sign * half).exp() for sign in (1, -1))
    # log(−log S) is not finite at 0 and 1: no interval there.
    flat = (curve[0] >= 1) | (curve[0] <= 0)
    low, high = torch.where(flat, curve[0], low), torch.where(flat, curve[0], high)
    # From time 0 on, at which all survive.
    x, y, under, over = (
        torch.cat([torch.tensor([start], dtype=torch.float64), part]).numpy()
        for start, part in ((0.0, distinct), (1.0, curve[0]), (1.0, low), (1.0, high))
    )
    return GroupCurve(label, x, y, under, over, distinct[censored > 0].numpy())


def _areas(
    risks: torch.Tensor, targets: torch.Tensor, times: tuple[float, ...], counts: torch.Tensor, name: str
) -> Plot:
    """Return the plot of the AUROC at each time with its band."""

    def areas_of_draws(block: torch.Tensor) -> dict[str, torch.Tensor]:
        ends, events = targets.unbind(1)
        weights = torch.where(block > 0, 1 / probability_uncensored(ends, events, block), 0.0)
        areas, _ = time_areas(risks, ends, events, block * weights, times, block)
        return {f"{time}": areas[:, k] for k, time in enumerate(times)}

    # Of the slides, each once; blocks of the draws give the intervals.
    once = measured(areas_of_draws, len(risks))
    bounds = resampled(areas_of_draws, list(once), counts)
    rows = [(time, once[f"{time}"], bounds[f"{time}"]) for time in times]
    points = [(time, area, bound or [math.nan, math.nan]) for time, area, bound in rows if area is not None]
    caption = "Slides with the event up to each time against those that survive it. Bands: 95 %, bootstrap over cases."
    return time_plot("AUROC over time", name, "AUROC", points, caption)


def _groups_table(targets: torch.Tensor, high: torch.Tensor) -> PageTable:
    """Return a table of both risk groups; arguments as of `_curves`."""
    rows = []
    for label, members in ((LOW, ~high), (HIGH, high)):
        times, events = targets[members].unbind(1)
        median = "–"
        if len(times):
            distinct, curve = kaplan_meier(times, events, torch.ones(1, len(times), dtype=torch.float64))
            below = distinct[curve[0] <= 0.5]
            median = f"{float(below[0]):.6g}" if len(below) else "not reached"
        rows.append((label, f"{len(times)}", f"{int(events.sum())}", median))
    return PageTable("Risk groups, by case", ("group", "cases", "events", "median survival"), tuple(rows))


def _horizon_table(
    risks: torch.Tensor, targets: torch.Tensor, times: tuple[float, ...], survival: torch.Tensor | None
) -> PageTable:
    """Return a table of predicted and observed survival and the AUROC at each time."""
    ends, events = targets.unbind(1)
    once = torch.ones(1, len(risks), dtype=torch.float64)
    weights = 1 / probability_uncensored(ends, events, once)
    areas, falls = time_areas(risks, ends, events, once * weights, times, once)
    observed = 1 - falls[0].cumsum(0)
    rows = []
    for k, time in enumerate(times):
        area, alive = float(areas[0, k]), int((ends > time).sum())
        mean = "–" if survival is None else f"{float(survival[:, k].mean()):.3f}"
        shown = f"{area:.3f}" if math.isfinite(area) else "not defined"
        rows.append((f"{time:.6g}", f"{alive}", mean, f"{float(observed[k]):.3f}", shown))
    head = ("time", "slides after it", "predicted survival", "observed", "AUROC")
    return PageTable("Survival at some times", head, tuple(rows))
