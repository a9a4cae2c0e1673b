"""What the truth allows: metrics of predictions by the areas that were drawn, which the noise of the labels limits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workflows.benchmarks.demo_task import auroc
from workflows.benchmarks.learnt_tasks.drawing import GRADE_CUTS, NUMBER, SLOPE, DrawnLabels

Floats = NDArray[np.float64]


def metrics_of_truth(labels: DrawnLabels, rows: NDArray[np.int64]) -> dict[str, float]:
    """Return metric -> its value for the best possible predictions of the slides ``rows``.

    Labels were drawn from the areas of blue and brown discs by known formulas; the best predictions are these formulas
    without noise.
    """
    blue, brown = labels.areas[rows].T
    marked, number = labels.marked[rows], labels.number[rows]
    scores = [auroc(labels.areas[rows, k], marked[:, k].astype(np.int64)) for k in range(2)]
    # Probability that each of the cuts between grades is exceeded, (slides, cuts).
    above = 1 / (1 + np.exp(-SLOPE * (blue[:, None] - np.array(GRADE_CUTS))))
    # The lowest grade that is exceeded with a probability of one half at most, as the task predicts it.
    median_grade = (above > 0.5).sum(1)
    mean, slope, _ = NUMBER
    errors = number - (mean + slope * brown)
    return {
        "auroc": float(np.mean(scores)),
        "quadratic_kappa": quadratic_kappa(median_grade, labels.grade[rows]),
        "r2": float(1 - (errors**2).sum() / ((number - number.mean()) ** 2).sum()),
        "mae": float(np.abs(errors).mean()),
        "concordance": concordance(blue, labels.months[rows], labels.died[rows]),
    }


def quadratic_kappa(predicted: NDArray[np.int64], true: NDArray[np.int64]) -> float:
    """Return 1 − (mean squared error / mean squared difference of all pairs of a predicted and a true grade)."""
    pairs = (predicted[:, None] - true[None, :]) ** 2
    return float(1 - ((predicted - true) ** 2).mean() / pairs.mean())


def concordance(risk: Floats, months: Floats, died: NDArray[np.bool_]) -> float:
    """Return Harrell's C: the fraction of comparable pairs whose earlier event has the higher risk, ties half.

    A pair is comparable if its earlier time ends with the event: only then is it known who lives longer.
    """
    # [i, j]: slide i has its event before the time of slide j ends.
    comparable = died[:, None] & (months[:, None] < months[None, :])
    higher = risk[:, None] - risk[None, :]
    return float(((higher > 0) + 0.5 * (higher == 0))[comparable].mean())
