"""How sure the metrics are: intervals from cases drawn again and again, all draws at once.

A draw of M cases from M with replacement is a row of counts. Every metric is a function of sums over samples, so all
draws are a few matrix products; that they are what torchmetrics gives on the drawn samples themselves is tested.
(Efron, Tibshirani: An Introduction to the Bootstrap, 1993; percentile intervals.)
"""

from __future__ import annotations

import numpy as np
import torch

from workflows.evaluation.metrics import CALIBRATION_BINS, METRICS, log_odds, ranks

DRAWS, SEED = 1000, 20_000
LEVEL = 0.95
MOST_NUMBERS = 4_000_000
"""Bound on counts that are worked on at once: 32 MB for each of a handful of temporaries."""

Intervals = dict[str, list[float] | None]


def draw_cases(cases: int, draws: int = DRAWS, seed: int = SEED) -> torch.Tensor:
    """Return (draws, cases) float64: how often each case is in each draw; a function of the arguments alone."""
    counts = np.random.default_rng(seed).multinomial(cases, np.full(cases, 1 / cases), size=draws)
    return torch.from_numpy(counts.astype(np.float64))


def intervals(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor) -> Intervals:
    """Return {metric: [low, high]}: the middle 95 % of the draws in which it is defined.

    None where fewer than half of the draws define it, where there is only one case, or where outputs are not finite.

    Args:
        logits: (N, K).
        targets: (N,).
        losses: (N,) of each sample, weighted as in training; ``loss`` is their mean.
        counts: (draws, N) how often each sample is in each draw; samples of one case go together.
    """
    names = ("loss", *METRICS)
    if len(targets) == 0 or not bool(logits.isfinite().all()) or bool((counts == 1).all()):
        return dict.fromkeys(names)
    rows = max(1, MOST_NUMBERS // len(targets))
    parts = [drawn_metrics(logits, targets, losses, part) for part in counts.split(rows)]
    values = {name: torch.cat([part[name] for part in parts]).numpy() for name in names}
    return {name: _middle(value) for name, value in values.items()}


def drawn_metrics(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the metrics of every draw, (draws,) each; NaN where undefined. See :func:`intervals`."""
    logits, losses = logits.double(), losses.double()
    classes, total = logits.shape[1], counts.sum(1)
    predicted = logits.argmax(1)
    confusion = _summed(counts, targets * classes + predicted, classes**2).view(-1, classes, classes)
    true, said, hit = confusion.sum(2), confusion.sum(1), confusion.diagonal(dim1=1, dim2=2)
    several = (true > 0).sum(1) > 1
    f1 = 2 * hit / (true + said)
    found = {
        "auroc": _areas(log_odds(logits), targets, counts, true),
        "balanced_accuracy": _mean_present(hit / true, true),
        "f1": f1[:, 1] if classes == 2 else _mean_present(f1, true),
        "quadratic_kappa": _kappa(confusion),
    }
    found = {name: torch.where(several, value, torch.nan) for name, value in found.items()}
    return found | {
        "loss": (counts * losses).sum(1) / total,
        "accuracy": hit.sum(1) / total,
        "calibration_error": _calibration(logits.softmax(1), predicted == targets, counts),
    }


def _summed(counts: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """Return (draws, groups): the counts of the samples of each group."""
    return torch.zeros(len(counts), groups, dtype=torch.float64).index_add_(1, group, counts)


def _mean_present(values: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the mean of (draws, classes) over the classes that a draw holds."""
    present = true > 0
    return torch.where(present, values, 0.0).sum(1) / present.sum(1)


def _areas(scores: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the area under the curve: the share of (positive, negative) pairs in the right order, ties half."""
    classes = scores.shape[1]
    areas = []
    for c in [1] if classes == 2 else range(classes):
        place = ranks(scores[:, c])
        positive = _summed(counts * (targets == c), place, int(place.max()) + 1)
        negative = _summed(counts * (targets != c), place, int(place.max()) + 1)
        below = negative.cumsum(1) - negative / 2
        areas.append((positive * below).sum(1) / (positive.sum(1) * negative.sum(1)))
    return areas[0] if classes == 2 else _mean_present(torch.stack(areas, 1), true)


def _kappa(confusion: torch.Tensor) -> torch.Tensor:
    """Return Cohen's kappa with quadratic weights of (draws, K, K)."""
    place = torch.arange(confusion.shape[1], dtype=torch.float64)
    weights = (place[:, None] - place) ** 2
    expected = confusion.sum(2)[:, :, None] * confusion.sum(1)[:, None, :]
    by_chance = (weights * expected).sum((1, 2)) / confusion.sum((1, 2))
    return 1 - (weights * confusion).sum((1, 2)) / by_chance


def _calibration(probabilities: torch.Tensor, right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the expected calibration error: |share right − mean confidence| of each bin, by the bin's share."""
    confidence = probabilities.amax(1)
    # In float32, as torchmetrics does: a confidence on an edge must fall to the same side.
    of_bin = torch.bucketize(confidence.float(), torch.linspace(0, 1, CALIBRATION_BINS + 1), right=True) - 1
    difference = _summed(counts * (right.double() - confidence), of_bin, CALIBRATION_BINS + 1)
    return difference.abs().sum(1) / counts.sum(1)


def _middle(values: np.ndarray) -> list[float] | None:
    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or np.isnan(values).all():
        return None
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(defined, [outside, 1 - outside])
    return [float(low), float(high)]
