"""What the truth allows: metrics of predictions by the areas that were drawn, which the noise of the labels limits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workflows.benchmarks.demo_task import auroc
from workflows.benchmarks.learnt_tasks.drawing import GRADE_CUTS, NUMBER, SLOPE, DrawnLabels

Floats = NDArray[np.float64]


def metrics_of_truth(labels: DrawnLabels, rows: NDArray[np.int64]) -> dict[str, float]:
    """Return each task's main metric of the best predictions of the slides ``rows``, under its name in a run."""
    blue, brown = labels.areas[rows].T
    marked, number = labels.marked[rows], labels.number[rows]
    scores = [auroc(labels.areas[rows, k], marked[:, k].astype(np.int64)) for k in range(2)]
    above = 1 / (1 + np.exp(-SLOPE * (blue[:, None] - np.array(GRADE_CUTS))))
    # The grade that a task predicts, too: the lowest whose exceeding has a probability of one half at most.
    median_grade = (above > 0.5).sum(1)
    errors = number - (NUMBER[0] + NUMBER[1] * brown)
    return {
        "auroc": float(np.mean(scores)),
        "quadratic_kappa": quadratic_kappa(median_grade, labels.grade[rows]),
        "r2": float(1 - (errors**2).sum() / ((number - number.mean()) ** 2).sum()),
        "mae": float(np.abs(errors).mean()),
        "concordance": concordance(blue, labels.months[rows], labels.died[rows]),
    }


def quadratic_kappa(predicted: NDArray[np.int64], true: NDArray[np.int64]) -> float:
    """Return 1 − the squared error, divided by that of all pairs of a predicted and a true grade."""
    pairs = (predicted[:, None] - true[None, :]) ** 2
    return float(1 - ((predicted - true) ** 2).mean() / pairs.mean())


def concordance(risk: Floats, months: Floats, died: NDArray[np.bool_]) -> float:
    """Return Harrell's C: of the pairs whose earlier time is an event, the fraction with the higher risk there."""
    # i ends with the event before j: only then is it known who lives longer.
    comparable = died[:, None] & (months[:, None] < months[None, :])
    higher = risk[:, None] - risk[None, :]
    return float(((higher > 0) + 0.5 * (higher == 0))[comparable].mean())
