"""Which weights are the best, decided from the records of their validations alone.

A record belongs to the step whose weights were evaluated, whenever its numbers arrived; so the answer is the same
however late they come, and after every resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workflows.evaluation.metrics import LOWER_IS_BETTER

Records = Mapping[int, Mapping[str, Any]]
"""Validation records by the step whose weights they are about."""


def merit(record: Mapping[str, Any], metric: str) -> tuple[float, float]:
    """Return what makes one validation better than another: the metric, then the lower loss; undefined is worst."""
    return _higher(record.get(metric), metric in LOWER_IS_BETTER), _higher(record.get("loss"), True)


def best_step(records: Records, metric: str, among: Iterable[int]) -> int | None:
    """Return the best of the steps ``among`` that were validated, the earliest of equals; None where none was."""
    steps = [step for step in sorted(set(among)) if step in records]
    return max(steps, key=lambda step: (*merit(records[step], metric), -step), default=None)


def _higher(value: float | None, lower_is_better: bool) -> float:
    if value is None:
        return float("-inf")
    return -float(value) if lower_is_better else float(value)
