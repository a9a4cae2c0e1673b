"""The interval of an AUROC of few cases, which also holds if every pair is ranked correctly."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

_STEPS = 60
"""Halvings of the bisection: more than a float has digits."""


def area_interval(area: float, positives: int, negatives: int, level: float = 0.95) -> list[float]:
    """Return the interval [low, high] of an area under the ROC curve.

    Newcombe, Confidence intervals for an effect size measure based on the Mann-Whitney statistic, part 2, Statistics in
    Medicine 25:559, 2006, method 5: it has all true areas A with |area − A| ≤ z · (standard error at A), by the formula
    of Hanley and McNeil. Unlike a bootstrap, it is defined for an area of 1, and holds from three cases on.

    Args:
        area: 0 to 1.
        positives: number of cases with the outcome, 1 or more.
        negatives: number of other cases, 1 or more.
        level: coverage.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    # In the formula of Hanley and McNeil, the mean of both group sizes stands for each: Newcombe's method 5.
    others = (positives + negatives) / 2 - 1

    def reaches(true_area: float) -> bool:
        """Whether the interval has this area."""
        factor = 1 + others * (1 - true_area) / (2 - true_area) + others * true_area / (1 + true_area)
        error = math.sqrt(true_area * (1 - true_area) * factor / (positives * negatives))
        return abs(area - true_area) <= z * error

    return [_farthest(area, 0.0, reaches), _farthest(area, 1.0, reaches)]


def _farthest(inside: float, outside: float, reaches: Callable[[float], bool]) -> float:
    """Return, by bisection, the farthest area from ``inside`` towards ``outside`` for which ``reaches`` is true."""
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        if reaches(middle):
            inside = middle
        else:
            outside = middle
    return inside
