"""The section of a cohort page for classes: curves, confusion, reliability, thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from workflows.tasks.bootstrap import intervals
from workflows.tasks.class_metrics import METRICS, metrics_of_probabilities
from workflows.tasks.curves import Array, ThresholdRow, threshold_rows
from workflows.tasks.page_section import MetricNumber, PageSection, PageTable, metric_numbers, shown_metric
from workflows.tasks.plots import confusion_plot, curve_plots, reliability_plots

RATES = ("at least", "slides", "sensitivity", "specificity", "precision", "negative value")


def class_section(
    probabilities: Array, labels: Sequence[object], draws: Array, names: Sequence[str], before: Array | None
) -> PageSection:
    """Return plots and tables of N labelled slides.

    Args:
        probabilities: (N, classes).
        labels: Their class indices.
        draws: (draws, N) how often each bootstrap draw has each slide.
        names: The classes.
        before: Probabilities before calibration; None: they were not calibrated.
    """
    targets = np.array(labels, dtype=np.int64)
    shown = [1] if len(names) == 2 else range(len(names))
    roc, precision_recall = curve_plots(probabilities, targets, draws, names, shown)
    metrics, numbers = _metrics(probabilities, targets, draws)
    if before is not None:
        earlier = dict(_metrics(before, targets, draws)[0])["calibration error"]
        metrics.append(("calibration error before calibration", earlier))
    predicted = probabilities.argmax(axis=1)
    return PageSection(
        metrics,
        [
            roc,
            precision_recall,
            confusion_plot(predicted, targets, names),
            *reliability_plots(probabilities, targets, before),
        ],
        [
            replace(
                threshold_table(f"Threshold on the probability of “{names[k]}”", probabilities[:, k], targets == k),
                folded=len(shown) > 1,
            )
            for k in shown
        ],
        # The error of a slide: what its true class lacks to a probability of 1.
        {k: 1 - float(probabilities[k, targets[k]]) for k in np.flatnonzero(predicted != targets).tolist()},
        numbers,
    )


def threshold_table(caption: str, score: Array, positive: NDArray[np.bool_]) -> PageTable:
    """Return the rates of a class at several thresholds on its score, both (N,)."""

    def texts(row: ThresholdRow) -> tuple[str, ...]:
        rates = (row.sensitivity, row.specificity, row.precision, row.negative_value)
        return (f"{row.threshold}", f"{row.positives}", *("–" if rate is None else f"{rate:.3f}" for rate in rates))

    return PageTable(caption, RATES, tuple(map(texts, threshold_rows(score, positive))))


def _metrics(
    probabilities: Array, targets: NDArray[np.int64], draws: Array
) -> tuple[list[tuple[str, str]], dict[str, MetricNumber]]:
    """Return (name, formatted value with interval) of each metric, and the numbers."""
    p, y = torch.from_numpy(probabilities), torch.from_numpy(targets)
    values = metrics_of_probabilities(p, y)
    # Logits with these probabilities; losses are not shown on the page.
    logits, no_losses = p.clamp(min=1e-12).log(), torch.zeros(len(y), dtype=torch.float64)
    bounds = intervals(logits, y, no_losses, torch.from_numpy(draws))
    shown = [shown_metric(name, values[name], bounds[name]) for name in METRICS]
    return shown, metric_numbers({name: values[name] for name in METRICS}, bounds)
