"""The best checkpoint and early stopping, both computed from validation records only.

A record belongs to the step whose weights were evaluated, not to the time when its metrics arrived. So the results do
not depend on delays, nor on whether the run was resumed.

::

    step of the weights     3     6     9    12    15
    auroc                 .71   .80   .79   .80   .78        patience 2: 9 and 12 are not better than 6,
                                             └─ the run ends with the weights of step 12

If the result that ends the run arrives late, training has continued in the meantime: everything written after the last
step is then removed, and later results are ignored. So weights, records and best checkpoint do not depend on delays.
With ``validation.policy: latest``, timing decides which weights are validated; for these, the same holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workflows.config.tasks import lower_is_better

Records = Mapping[int, Mapping[str, Any]]
"""Validation records by the step whose weights were validated."""


def merit(record: Mapping[str, Any], metric: str) -> tuple[float, float]:
    """Return a sort key of a validation, higher is better: the metric, then the loss; undefined is worst."""
    return _higher(record.get(metric), lower_is_better(metric)), _higher(record.get("loss"), lower_is_better=True)


def best_step(records: Records, metric: str, among: Iterable[int]) -> int | None:
    """Return the best of the validated steps in ``among``, the earliest of equals; None if there are none.

    Weights with outputs that are not finite have no loss, and are never the best.
    """
    # For the link `best`, `among` has the steps whose checkpoints `run.keep` has left.
    steps = [step for step in sorted(set(among)) if step in records and records[step].get("loss") is not None]
    # −step: of equals the earliest, so a resumed run that sees all records at once chooses the same.
    return max(steps, key=lambda step: (*merit(records[step], metric), -step), default=None)


def _higher(value: float | None, lower_is_better: bool) -> float:
    if value is None:
        # A metric is undefined if, say, one class is missing: worse than any value, but still comparable.
        return float("-inf")
    return -float(value) if lower_is_better else float(value)


def early_stop_step_of(records: Records, metric: str, patience: int | None) -> int | None:
    """Return the step with which the run ends, None while it continues.

    Args:
        records: All validations so far, by step.
        metric: The metric to compare; the loss decides between equals, as for the best checkpoint.
        patience: End after this many consecutive validations without improvement; None: never.
    """
    best: tuple[float, float] | None = None
    without_improvement = 0
    # By step, not in order of arrival: validators may report late.
    for step in sorted(records):
        value = merit(records[step], metric)
        if best is None or value > best:
            best, without_improvement = value, 0
        else:
            without_improvement += 1
        if patience is not None and without_improvement >= patience:
            return step
    return None
