"""The section of a cohort page for several labels: their curves, and how well each is recognised."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from data.samples.label_sets import NO, UNKNOWN, YES
from workflows.tasks.bootstrap import measured, resampled
from workflows.tasks.curves import Array
from workflows.tasks.multilabel.metrics import MEANS, label_metrics, macro, with_rank_intervals
from workflows.tasks.page_section import PageSection, PageTable, metric_numbers, shown_metric
from workflows.tasks.plots import ScoredClass, rate_plots

MAX_CURVES = 8
"""Largest number of labels whose curves are drawn; those with most slides are."""


def labels_section(
    values: Array, targets: torch.Tensor, draws: Array, names: Sequence[str], thresholds: Sequence[float]
) -> PageSection:
    """Return plots and tables of N labelled slides.

    Args:
        values: (N, labels) probabilities.
        targets: (N, labels), see `data.samples.label_sets`.
        draws: (draws, N) how often each bootstrap draw has each slide.
        names: The labels.
        thresholds: Threshold on the probability of each label.
    """
    scores = torch.from_numpy(np.ascontiguousarray(values))
    predicted = scores >= torch.tensor(thresholds, dtype=torch.float64)

    def metrics_of_draws(counts: torch.Tensor) -> dict[str, torch.Tensor]:
        of_labels = label_metrics(scores, predicted, targets, counts)
        means = {name: macro(of_labels[name]) for name in MEANS}
        return means | {f"auroc_{name}": of_labels["auroc"][:, k] for k, name in enumerate(names)}

    # The metrics count each slide once; their intervals come from the draws.
    once = measured(metrics_of_draws, len(scores))
    counts = torch.from_numpy(draws)
    # For labels known of few slides, an AUROC's interval is by ranks; as in `Multilabel.intervals`, so that the page
    # states what the metrics of a validation do.
    bounds = with_rank_intervals(resampled(metrics_of_draws, list(once), counts), once, targets, counts, names)
    texts = {name: shown_metric(name, value, bounds[name])[1] for name, value in once.items()}
    shown = [(f"{name.replace('_', ' ')}, mean of the labels", texts[name]) for name in MEANS]
    # The error of a slide: how far the probabilities of its wrongly predicted labels are off.
    wrong = ((predicted != (targets == YES)) & (targets != UNKNOWN)).double()
    errors = (wrong * (scores - targets).abs()).sum(1)
    return PageSection(
        shown,
        rate_plots(_curves(values, targets.numpy(), draws, names)),
        [_table(scores, predicted, targets, names, thresholds, texts)],
        {k: float(errors[k]) for k in wrong.any(1).nonzero()[:, 0].tolist()},
        metric_numbers(once, bounds),
    )


def _curves(values: Array, targets: Array, draws: Array, names: Sequence[str]) -> list[ScoredClass]:
    """Return the labels whose curves are drawn, each on the slides for which it is known."""
    most = sorted(range(len(names)), key=lambda k: -int((targets[:, k] == YES).sum()))[:MAX_CURVES]
    curves = []
    for k in sorted(most):
        labelled = targets[:, k] != UNKNOWN
        curves.append(ScoredClass(names[k], k, values[labelled, k], targets[labelled, k] == YES, draws[:, labelled]))
    return curves


def _table(
    scores: torch.Tensor,
    predicted: torch.Tensor,
    targets: torch.Tensor,
    names: Sequence[str],
    thresholds: Sequence[float],
    texts: dict[str, str],
) -> PageTable:
    """Return a table of how well each label is recognised at its threshold."""
    rows = []
    for k, name in enumerate(names):
        yes, no = targets[:, k] == YES, targets[:, k] == NO
        hit, rejected = (float(part.double().mean()) for part in (predicted[yes, k], ~predicted[no, k]))
        rates = ("–" if math.isnan(rate) else f"{rate:.3f}" for rate in (hit, rejected))
        counts = (f"{int(yes.sum())}", f"{int(no.sum())}", f"{int((targets[:, k] == UNKNOWN).sum())}")
        rows.append((name, *counts, texts[f"auroc_{name}"], f"{thresholds[k]:.3f}", *rates))
    head = ("label", "with", "without", "unknown", "AUROC", "threshold", "sensitivity", "specificity")
    return PageTable("Labels", head, tuple(rows))
