"""ROC, precision-recall and reliability curves of a cohort with bootstrap bands, and a table of thresholds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GRID = np.linspace(0.0, 1.0, 101)
"""False positive rates (or recalls) at which the curves of all draws are evaluated."""
BAND = (0.025, 0.975)
RELIABILITY_BINS = 10
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, eq=False)
class RateCurve:
    """A curve of all slides, its band over the draws, and the area under it.

    Attributes:
        x, y: Points of the curve, each (n,).
        low, high: The band at ``GRID``; None if no draw defines the curve.
        area: Area under the curve; average precision for precision-recall.
    """

    x: Array
    y: Array
    low: Array | None
    high: Array | None
    area: float


@dataclass(frozen=True)
class ThresholdRow:
    """Rates of a class at a threshold on its probability; None if undefined. ``positives``: slides at or above it."""

    threshold: float
    positives: int
    sensitivity: float | None
    specificity: float | None
    precision: float | None
    negative_value: float | None


def roc_curve(score: Array, positive: NDArray[np.bool_], draws: Array) -> RateCurve | None:
    """Return the ROC curve of a class; None if all slides are positive, or none is.

    Args:
        score: (N,) score of the class.
        positive: (N,) whether each slide is of the class.
        draws: (draws, N) how often each slide is in each bootstrap draw.
    """
    if positive.all() or not positive.any():
        return None
    score, positive, draws = _by_descending_score(score, positive, draws)
    x, y = _roc(score, positive, np.ones(len(score)))
    low, high = _band(lambda weights: _roc(score, positive, weights), positive, draws)
    return RateCurve(x, y, low, high, float(np.trapezoid(y, x)))


def precision_recall_curve(score: Array, positive: NDArray[np.bool_], draws: Array) -> RateCurve | None:
    """Return the precision-recall curve of a class; None if all or none are positive; see :func:`roc_curve`."""
    if positive.all() or not positive.any():
        return None
    score, positive, draws = _by_descending_score(score, positive, draws)
    x, y = _precision_recall(score, positive, np.ones(len(score)))
    low, high = _band(lambda weights: _precision_recall(score, positive, weights), positive, draws)
    # Steps, not trapezoids: between two points, precision does not follow the straight line, and its area would be too
    # high.
    return RateCurve(x, y, low, high, float((np.diff(x) * y[1:]).sum()))


def _by_descending_score(
    score: Array, positive: NDArray[np.bool_], draws: Array
) -> tuple[Array, NDArray[np.bool_], Array]:
    """Return the slides sorted by score, highest first; done once for all draws."""
    order = np.argsort(-score, kind="stable")
    return score[order], positive[order], draws[:, order]


def _counts(score: Array, positive: NDArray[np.bool_], weights: Array) -> tuple[Array, Array]:
    """Return the numbers of true and false positives (n,) at each distinct threshold, of slides sorted by score."""
    # The last of equal scores: they pass a threshold together.
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    return np.cumsum(weights * positive)[last], np.cumsum(weights * ~positive)[last]


def _roc(score: Array, positive: NDArray[np.bool_], weights: Array) -> tuple[Array, Array]:
    true_positives, false_positives = _counts(score, positive, weights)
    # From (0, 0), where nothing is called positive.
    return np.append(0.0, false_positives / false_positives[-1]), np.append(0.0, true_positives / true_positives[-1])


def _precision_recall(score: Array, positive: NDArray[np.bool_], weights: Array) -> tuple[Array, Array]:
    """Return (recall, precision) for falling thresholds of the score, from recall 0 on."""
    true_positives, false_positives = _counts(score, positive, weights)
    # A draw may lack the slides of the highest scores: precision is 0 / 0 there.
    drawn = true_positives + false_positives > 0
    precision = true_positives[drawn] / (true_positives + false_positives)[drawn]
    # Down to recall 0 with the first precision, by convention.
    return np.append(0.0, true_positives[drawn] / true_positives[-1]), np.append(precision[0], precision)


def _band(
    curve: Callable[[Array], tuple[Array, Array]], positive: NDArray[np.bool_], draws: Array
) -> tuple[Array | None, Array | None]:
    """Return the (low, high) ends of a curve at each point of `GRID` over draws; None if no draw has both classes.

    Args:
        curve: Returns (x, y) for the weights of the samples.
        positive: (N,) whether each sample is of the class.
        draws: (draws, N) how often each draw has each sample.
    """
    rows = []
    for weights in draws:
        if (weights * positive).sum() > 0 and (weights * ~positive).sum() > 0:
            rows.append(np.interp(GRID, *curve(weights)))
    if not rows:
        return None, None
    low, high = np.quantile(np.stack(rows), BAND, axis=0)
    return low, high


def confusion(targets: NDArray[np.int64], predicted: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return the confusion matrix: counts by (true class, predicted class)."""
    counts = np.bincount(targets * classes + predicted, minlength=classes**2)
    return counts.reshape(classes, classes)


def reliability(probabilities: Array, targets: NDArray[np.int64]) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return (mean confidence, accuracy, count) for equal bins of the highest probability; NaN for an empty bin."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == targets
    # A probability of 1 belongs to the last bin.
    bin_of = np.minimum((confidence * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    counts = np.bincount(bin_of, minlength=RELIABILITY_BINS)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(bin_of, confidence, RELIABILITY_BINS) / counts
        accuracy = np.bincount(bin_of, right.astype(float), RELIABILITY_BINS) / counts
    return mean, accuracy, counts


def threshold_rows(score: Array, positive: NDArray[np.bool_]) -> list[ThresholdRow]:
    """Return the rates of a class at each of ``THRESHOLDS``; ``score``, ``positive``: (N,)."""
    rows = []
    for threshold in THRESHOLDS:
        predicted = score >= threshold
        tp, fp = int((predicted & positive).sum()), int((predicted & ~positive).sum())
        fn, tn = int((~predicted & positive).sum()), int((~predicted & ~positive).sum())
        # Sensitivity, specificity, precision and negative predictive value.
        rates = (_rate(tp, fn), _rate(tn, fp), _rate(tp, fp), _rate(tn, fn))
        rows.append(ThresholdRow(threshold, tp + fp, *rates))
    return rows


def _rate(good: int, bad: int) -> float | None:
    return good / (good + bad) if good + bad else None
