"""How good a cohort's probabilities are, as curves and tables: with bands from cases drawn again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GRID = np.linspace(0.0, 1.0, 101)
"""Where curves of draws are compared: false positive rates, or recalls."""
BAND = (0.025, 0.975)
RELIABILITY_BINS = 10
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, eq=False)
class RateCurve:
    """A curve through all slides, its band over the draws, and the area under it.

    Attributes:
        x, y: corners of the curve, each (n,).
        low, high: of the band, at ``GRID``; None if no draw defines it.
        area: under the curve (average precision for precision over recall).
    """

    x: Array
    y: Array
    low: Array | None
    high: Array | None
    area: float


@dataclass(frozen=True)
class ThresholdRow:
    """Rates of a threshold on the probability of a class; undefined ones are None."""

    threshold: float
    positives: int
    sensitivity: float | None
    specificity: float | None
    precision: float | None
    negative_value: float | None


def roc_curve(score: Array, positive: NDArray[np.bool_], draws: Array) -> RateCurve | None:
    """Return the true over the false positive rate of a class; None if only one kind of slide exists.

    Args:
        score: (N,) of the class.
        positive: (N,) whether the slide is of it.
        draws: (draws, N) how often each slide is drawn.
    """
    if positive.all() or not positive.any():
        return None
    score, positive, draws = _from_the_highest(score, positive, draws)
    x, y = _roc(score, positive, np.ones(len(score)))
    low, high = _band(lambda weights: _roc(score, positive, weights), positive, draws)
    return RateCurve(x, y, low, high, float(np.trapezoid(y, x)))


def precision_recall_curve(score: Array, positive: NDArray[np.bool_], draws: Array) -> RateCurve | None:
    """Return the precision over the recall of a class; see :func:`roc_curve`."""
    if positive.all() or not positive.any():
        return None
    score, positive, draws = _from_the_highest(score, positive, draws)
    x, y = _precision_recall(score, positive, np.ones(len(score)))
    low, high = _band(lambda weights: _precision_recall(score, positive, weights), positive, draws)
    return RateCurve(x, y, low, high, float((np.diff(x) * y[1:]).sum()))


def _from_the_highest(
    score: Array, positive: NDArray[np.bool_], draws: Array
) -> tuple[Array, NDArray[np.bool_], Array]:
    """Return the same slides, sorted once for all draws."""
    order = np.argsort(-score, kind="stable")
    return score[order], positive[order], draws[:, order]


def _counts(score: Array, positive: NDArray[np.bool_], weights: Array) -> tuple[Array, Array]:
    """Return the true and the false positives (n,) at each distinct threshold, of slides sorted by score."""
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    return np.cumsum(weights * positive)[last], np.cumsum(weights * ~positive)[last]


def _roc(score: Array, positive: NDArray[np.bool_], weights: Array) -> tuple[Array, Array]:
    hits, alarms = _counts(score, positive, weights)
    return np.append(0.0, alarms / alarms[-1]), np.append(0.0, hits / hits[-1])


def _precision_recall(score: Array, positive: NDArray[np.bool_], weights: Array) -> tuple[Array, Array]:
    hits, alarms = _counts(score, positive, weights)
    drawn = hits + alarms > 0
    precision = hits[drawn] / (hits + alarms)[drawn]
    return np.append(0.0, hits[drawn] / hits[-1]), np.append(precision[0], precision)


def _band(
    curve: Callable[[Array], tuple[Array, Array]], positive: NDArray[np.bool_], draws: Array
) -> tuple[Array | None, Array | None]:
    rows = []
    for weights in draws:
        if (weights * positive).sum() > 0 and (weights * ~positive).sum() > 0:
            rows.append(np.interp(GRID, *curve(weights)))
    if not rows:
        return None, None
    low, high = np.quantile(np.stack(rows), BAND, axis=0)
    return low, high


def confusion(targets: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return (true class, predicted class) counts."""
    counts = np.bincount(targets * classes + predicted, minlength=classes**2)
    return counts.reshape(classes, classes)


def reliability(probabilities: Array, targets: NDArray[np.int64]) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return (mean confidence, share right, count) of slides in equal bins of the highest probability; NaN for none."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == targets
    place = np.minimum((confidence * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    counts = np.bincount(place, minlength=RELIABILITY_BINS)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(place, confidence, RELIABILITY_BINS) / counts
        share = np.bincount(place, right.astype(float), RELIABILITY_BINS) / counts
    return mean, share, counts


def threshold_rows(score: Array, positive: NDArray[np.bool_]) -> list[ThresholdRow]:
    """Return what thresholds on the probability of a class do."""
    rows = []
    for threshold in THRESHOLDS:
        called = score >= threshold
        hits, alarms = int((called & positive).sum()), int((called & ~positive).sum())
        missed, passed = int((~called & positive).sum()), int((~called & ~positive).sum())
        rates = (_rate(hits, missed), _rate(passed, alarms), _rate(hits, alarms), _rate(passed, missed))
        rows.append(ThresholdRow(threshold, hits + alarms, *rates))
    return rows


def _rate(good: int, bad: int) -> float | None:
    return good / (good + bad) if good + bad else None
