"""How often each slide is drawn: classes alike often, or as a column of the labels says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from data.samples.dataset import SlideRef
from data.samples.labels import Labels
from hyfi_core.errors import RequestError


def balanced_weights(slides: Sequence[SlideRef]) -> tuple[float, ...]:
    """Return a weight for each slide so that every class that is there is drawn alike often."""
    counts = Counter(slide.label for slide in slides)
    return tuple(1.0 / counts[slide.label] for slide in slides)


def column_weights(slides: Sequence[SlideRef], labels: Labels, column: str) -> tuple[float, ...]:
    """Return each slide's number in a column of the labels: how often it is drawn, against the others.

    Raises:
        RequestError: there is no such column, a slide's value is no number ≥ 0, or all are 0.
    """
    if not labels.rows or column not in labels.rows[0]:
        known = ", ".join(labels.rows[0]) if labels.rows else "none"
        raise RequestError(f"data.weights_column: the labels have no column {column!r}; they have: {known}")
    values = {row[labels.key]: row[column] for row in labels.rows if row[column]}
    weights = tuple(_number(slide, values, labels, column) for slide in slides)
    if not sum(weights):
        raise RequestError(f"data.weights_column: {column!r} is 0 for every training slide; none could be drawn")
    return weights


def _number(slide: SlideRef, values: dict[str, str], labels: Labels, column: str) -> float:
    text = values.get(slide.slide_id if labels.key == "slide_id" else slide.case_id, "")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and number >= 0):
        raise RequestError(
            f"data.weights_column: slide {slide.slide_id} has {text!r} in {column!r}; allowed: a number ≥ 0"
        )
    return number
