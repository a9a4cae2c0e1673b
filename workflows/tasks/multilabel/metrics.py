"""Metrics of several labels, of many draws from the samples at once; samples whose label is unknown do not count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from data.samples.label_sets import NO, UNKNOWN, YES
from workflows.tasks.bootstrap import FEW, Intervals, rank_interval

PREDICTION_MEANS = ("balanced_accuracy", "f1")
"""Means over the labels that depend on thresholds."""
MEANS = ("auroc", "average_precision", *PREDICTION_MEANS)
"""Metrics that are means over the labels in which they are defined."""


def label_metrics(
    scores: torch.Tensor, predicted: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return each of `MEANS` for each label, (draws, labels); NaN if undefined: a draw lacks slides with or without it.

    ``auroc``: fraction of the pairs (with, without the label) in right order, ties one half. ``average_precision``:
    mean of the precision at each slide with the label, in the order of scores. ``balanced_accuracy``: mean of
    sensitivity and specificity. ``f1``: harmonic mean of precision and sensitivity.

    Args:
        scores: (N, labels) float64 by which slides are ranked.
        predicted: (N, labels) whether each label is predicted.
        targets: (N, labels), see `data.samples.label_sets`.
        counts: (draws, N) float64, how often each draw has each sample.
    """
    columns = []
    for k in range(scores.shape[1]):
        # Each label on the slides for which it is known: a slide may lack one label and have others.
        labelled = (targets[:, k] != UNKNOWN).nonzero()[:, 0]
        columns.append(
            _of_label(scores[labelled, k], predicted[labelled, k], targets[labelled, k], counts[:, labelled])
        )
    return {name: torch.stack([column[name] for column in columns], 1) for name in MEANS}


def macro(values: torch.Tensor) -> torch.Tensor:
    """Return the mean (draws,) over the labels (draws, labels) in which a metric is defined; NaN if it is in none."""
    is_defined = values.isfinite()
    # 0 / 0 is NaN, as it should be. A product with `is_defined` would not do: NaN · 0 is NaN.
    return torch.where(is_defined, values, 0.0).sum(1) / is_defined.sum(1)


def with_rank_intervals(
    intervals: Intervals,
    areas: Mapping[str, float | None],
    targets: torch.Tensor,
    counts: torch.Tensor,
    names: Sequence[str],
) -> Intervals:
    """Return intervals with the `rank_interval` of the AUROC of each label that is known for `FEW` slides or fewer.

    Args:
        intervals: By name of the metric; that of a label's AUROC is ``auroc_<label>``.
        areas: The AUROCs, under the same names.
        targets: (N, labels), see `data.samples.label_sets`.
        counts: (draws, N) how often each draw has each sample; equal for samples of the same case.
        names: The labels.
    """
    replaced = dict(intervals)
    for k, name in enumerate(names):
        labelled, area = targets[:, k] != UNKNOWN, areas[f"auroc_{name}"]
        if area is not None and int(labelled.sum()) <= FEW:
            of_label = rank_interval({"auroc": None}, area, targets[labelled, k] == YES, counts[:, labelled])
            replaced[f"auroc_{name}"] = of_label["auroc"]
    return replaced


def _of_label(
    scores: torch.Tensor, predicted: torch.Tensor, target: torch.Tensor, counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the metrics of one label in each draw; NaN if undefined.

    Args:
        scores: (N,) of the label.
        predicted: (N,) whether the label is predicted.
        target: (N,) `YES`, `NO` or `UNKNOWN`.
        counts: (draws, N) float64, how often each draw has each sample.
    """
    yes, no = counts * (target == YES), counts * (target == NO)
    total_yes, total_no = yes.sum(1), no.sum(1)
    defined = (total_yes > 0) & (total_no > 0)
    distinct, rank = torch.unique(-scores, return_inverse=True)  # the highest score first
    shape = (len(counts), len(distinct))
    # (draws, distinct scores): slides with and without the label that have this score.
    positives, negatives = (torch.zeros(shape, dtype=torch.float64).index_add_(1, rank, part) for part in (yes, no))
    # Those with this score or a higher one.
    with_label, without_label = positives.cumsum(1), negatives.cumsum(1)
    # For each slide with the label: those without it that rank lower, and half of those with the same score.
    area = (positives * (total_no[:, None] - without_label + negatives / 2)).sum(1) / (total_yes * total_no)
    total = with_label + without_label
    # 0 / 0 if a draw has no slide with so high a score. Any value will do: it has no positives there, either.
    precision = torch.where(total > 0, with_label / total, 0.0)
    true_positives, false_positives = (yes * predicted).sum(1), (no * predicted).sum(1)
    values = {
        "auroc": area,
        "average_precision": (positives * precision).sum(1) / total_yes,
        "balanced_accuracy": (true_positives / total_yes + 1 - false_positives / total_no) / 2,
        "f1": 2 * true_positives / (total_yes + true_positives + false_positives),
    }
    return {name: torch.where(defined, value, torch.nan) for name, value in values.items()}


def best_thresholds(probabilities: torch.Tensor, targets: torch.Tensor) -> list[float | None]:
    """Return the threshold of each label with the highest balanced accuracy; None if all slides have the same label.

    It lies halfway between two neighbouring probabilities; among equally good ones, the nearest to one half is taken.

    Args:
        probabilities: (N, labels) float64.
        targets: (N, labels).
    """
    thresholds: list[float | None] = []
    for k in range(probabilities.shape[1]):
        yes, no = (probabilities[targets[:, k] == value, k] for value in (YES, NO))
        if not len(yes) or not len(no):
            thresholds.append(None)
            continue
        # All thresholds between the same two probabilities divide the slides alike: one of each is enough.
        values = torch.unique(torch.cat([yes, no]))
        between = (values[1:] + values[:-1]) / 2
        if not len(between):
            thresholds.append(None)
            continue
        merit = (yes[None] >= between[:, None]).double().mean(1) + (no[None] < between[:, None]).double().mean(1)
        # Sums of means may differ in their last bits although they are equal.
        best = between[merit >= merit.max() - 1e-12]
        thresholds.append(float(best[(best - 0.5).abs().argmin()]))
    return thresholds
