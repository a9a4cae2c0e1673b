"""Confidence intervals of metrics by bootstrap over cases, computed for all draws at once.

A draw of M cases from M with replacement is a row of counts. Every metric is a function of sums over samples, so all
draws take a few matrix products. Tests compare the result with torchmetrics on the drawn samples. Percentile intervals:
Efron and Tibshirani, An Introduction to the Bootstrap, 1993.
"""

from __future__ import annotations

import numpy as np
import torch

from workflows.evaluation.metrics import CALIBRATION_BINS, METRICS, log_odds, ranks

DRAWS, SEED = 1000, 20_000
LEVEL = 0.95
MAX_COUNTS = 4_000_000
"""Most counts processed at once: 32 MB for each of a few temporary arrays."""

Intervals = dict[str, list[float] | None]


def draw_cases(cases: int, draws: int = DRAWS, seed: int = SEED) -> torch.Tensor:
    """Return (draws, cases) float64: how often each case is in each draw; depends only on the arguments."""
    counts = np.random.default_rng(seed).multinomial(cases, np.full(cases, 1 / cases), size=draws)
    return torch.from_numpy(counts.astype(np.float64))


def intervals(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor) -> Intervals:
    """Return {metric: [low, high]}: the middle 95 % of the draws in which the metric is defined.

    The interval is None if fewer than half of the draws define the metric, if there is only one case, or if logits are
    not finite.

    Args:
        logits: (N, K).
        targets: (N,) class indices.
        losses: (N,) loss of each sample, weighted as in training; ``loss`` is their mean.
        counts: (draws, N) how often each sample is in each draw; equal for samples of the same case.
    """
    names = ("loss", *METRICS)
    if len(targets) == 0 or not bool(logits.isfinite().all()) or bool((counts == 1).all()):
        return dict.fromkeys(names)
    rows = max(1, MAX_COUNTS // len(targets))
    parts = [drawn_metrics(logits, targets, losses, part) for part in counts.split(rows)]
    values = {name: torch.cat([part[name] for part in parts]).numpy() for name in names}
    return {name: _interval(value) for name, value in values.items()}


def drawn_metrics(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the metrics of every draw, each (draws,); NaN if undefined. See :func:`intervals`."""
    logits, losses = logits.double(), losses.double()
    classes, total = logits.shape[1], counts.sum(1)
    predicted = logits.argmax(1)
    confusion = _summed(counts, targets * classes + predicted, classes**2).view(-1, classes, classes)
    # (draws, classes): samples of each class, samples predicted as it, and both.
    true, predicted_as, hit = confusion.sum(2), confusion.sum(1), confusion.diagonal(dim1=1, dim2=2)
    several_classes = (true > 0).sum(1) > 1
    f1 = 2 * hit / (true + predicted_as)
    found = {
        "auroc": _areas(log_odds(logits), targets, counts, true),
        "balanced_accuracy": _mean_present(hit / true, true),
        "f1": f1[:, 1] if classes == 2 else _mean_present(f1, true),
        "quadratic_kappa": _kappa(confusion),
    }
    found = {name: torch.where(several_classes, value, torch.nan) for name, value in found.items()}
    return found | {
        "loss": (counts * losses).sum(1) / total,
        "accuracy": hit.sum(1) / total,
        "calibration_error": _calibration(logits.softmax(1), predicted == targets, counts),
    }


def _summed(counts: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """Return (draws, groups): the sum of ``counts`` (draws, N) over the samples of each group; ``group``: (N,)."""
    return torch.zeros(len(counts), groups, dtype=torch.float64).index_add_(1, group, counts)


def _mean_present(values: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the mean of (draws, classes) over the classes that are present in a draw."""
    present = true > 0
    return torch.where(present, values, 0.0).sum(1) / present.sum(1)


def _areas(scores: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the area under the ROC curve: the fraction of pairs (positive, negative) in right order, ties half."""
    classes = scores.shape[1]
    areas = []
    for c in [1] if classes == 2 else range(classes):
        rank = ranks(scores[:, c])
        positive = _summed(counts * (targets == c), rank, int(rank.max()) + 1)
        negative = _summed(counts * (targets != c), rank, int(rank.max()) + 1)
        below = negative.cumsum(1) - negative / 2
        areas.append((positive * below).sum(1) / (positive.sum(1) * negative.sum(1)))
    return areas[0] if classes == 2 else _mean_present(torch.stack(areas, 1), true)


def _kappa(confusion: torch.Tensor) -> torch.Tensor:
    """Return Cohen's kappa with quadratic weights (draws,) of confusion matrices (draws, K, K)."""
    place = torch.arange(confusion.shape[1], dtype=torch.float64)
    weights = (place[:, None] - place) ** 2
    expected = confusion.sum(2)[:, :, None] * confusion.sum(1)[:, None, :]
    by_chance = (weights * expected).sum((1, 2)) / confusion.sum((1, 2))
    return 1 - (weights * confusion).sum((1, 2)) / by_chance


def _calibration(probabilities: torch.Tensor, right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the expected calibration error (draws,): |accuracy − confidence| of bins, weighted by their samples."""
    confidence = probabilities.amax(1)
    # In float32 like torchmetrics, so that a confidence on the edge of a bin falls into the same one.
    of_bin = torch.bucketize(confidence.float(), torch.linspace(0, 1, CALIBRATION_BINS + 1), right=True) - 1
    difference = _summed(counts * (right.double() - confidence), of_bin, CALIBRATION_BINS + 1)
    return difference.abs().sum(1) / counts.sum(1)


def _interval(values: np.ndarray) -> list[float] | None:
    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or np.isnan(values).all():
        return None
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(defined, [outside, 1 - outside])
    return [float(low), float(high)]
