"""Which weights are the best, and when a run ends because they get no better: both from validation records alone.

A record belongs to the step whose weights were evaluated, whenever its numbers arrived; so the answer is the same
however late they come, and after every resume.

::

    step of the weights     3     6     9    12    15
    auroc                 .71   .80   .79   .80   .78        patience 2: 9 and 12 are not better than 6,
                                             └─ the run ends with step 12

Early stopping names a step of weights. Where its result came late, training has continued meanwhile; what was written
after that step is removed, and later results are ignored. So the run ends with the same weights, records and best
checkpoint however late the results were. (With ``validation.policy: latest`` it depends on time which weights are
validated at all; the rule holds for those.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workflows.evaluation.metrics import LOWER_IS_BETTER

Records = Mapping[int, Mapping[str, Any]]
"""Validation records by the step whose weights they are about."""


def merit(record: Mapping[str, Any], metric: str) -> tuple[float, float]:
    """Return the sort key of a validation: the metric, then the lower loss; undefined is worst."""
    return _higher(record.get(metric), metric in LOWER_IS_BETTER), _higher(record.get("loss"), True)


def best_step(records: Records, metric: str, among: Iterable[int]) -> int | None:
    """Return the best of the steps ``among`` that were validated, the earliest of equals; None if none was."""
    steps = [step for step in sorted(set(among)) if step in records]
    return max(steps, key=lambda step: (*merit(records[step], metric), -step), default=None)


def _higher(value: float | None, lower_is_better: bool) -> float:
    if value is None:
        return float("-inf")
    return -float(value) if lower_is_better else float(value)


def last_step(records: Records, metric: str, patience: int | None) -> int | None:
    """Return the step with which the run ends, None while it continues.

    Args:
        records: all validations so far, by step.
        metric: that decides; the loss decides between equals, as for the best checkpoint.
        patience: validations in a row that are not better than the best before them; None: forever.
    """
    best: tuple[float, float] | None = None
    in_vain = 0
    for step in sorted(records):
        value = merit(records[step], metric)
        if best is None or value > best:
            best, in_vain = value, 0
        else:
            in_vain += 1
        if patience is not None and in_vain >= patience:
            return step
    return None
