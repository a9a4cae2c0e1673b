"""Labels of several targets, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from data.samples.labels import Labels, Target
from workflows.tasks.several.part import MISSING_NUMBER


@dataclass(frozen=True)
class SeveralLabels(Labels):
    """Labels of several targets.

    Attributes:
        titles: Names of the targets.
        parts: The labels of each target; None: the table lacks its columns.
        numbers: How many numbers a label of each target takes.
        are_class_indices: Whether a label of each target is the index of a class.
    """

    titles: tuple[str, ...] = ()
    parts: tuple[Labels | None, ...] = ()
    numbers: tuple[int, ...] = ()
    are_class_indices: tuple[bool, ...] = ()

    def text(self, target: Target) -> str:
        """Return the labels with their names: ``grade: high | age: 41``."""
        return " | ".join(
            f"{title}: {part.text(label)}"
            for title, part, label in zip(self.titles, self.parts, self.each(target), strict=True)
            if part is not None and label is not None
        )

    def names_of(self, target: Target) -> tuple[str, ...]:
        """Return the classes of each target that has classes, after its name."""
        return tuple(
            f"{title} {name}"
            for title, part, label in zip(self.titles, self.parts, self.each(target), strict=True)
            if part is not None and label is not None
            for name in part.names_of(label)
        )

    def each(self, target: Target) -> list[Target | None]:
        """Return the label of each target, from the numbers of all; None: the slide lacks it."""
        assert isinstance(target, tuple)
        labels: list[Target | None] = []
        first = 0
        for count, is_class_index in zip(self.numbers, self.are_class_indices, strict=True):
            numbers = target[first : first + count]
            first += count
            if math.isnan(numbers[0]):  # `MISSING_NUMBER`: all numbers of a missing label are
                labels.append(None)
            else:
                labels.append(int(numbers[0]) if is_class_index else numbers)
        return labels


def side_by_side(titles: Sequence[str], parts: Sequence[Labels | None], numbers: Sequence[int]) -> SeveralLabels:
    """Return the labels of several targets; a slide without any of them is unlabelled.

    Args:
        titles: Names of the targets.
        parts: The labels of each target, all read from one table; None: it lacks the target's columns. At least one
            target has labels.
        numbers: How many numbers a label of each target takes.
    """
    present = [part for part in parts if part is not None]
    items = dict.fromkeys(item for part in present for item in part.indices)  # slides or cases, in order
    indices: dict[str, Target | None] = {}
    for item in items:
        labels = [None if part is None else part.indices.get(item) for part in parts]
        rows = [_numbers(label, count) for label, count in zip(labels, numbers, strict=True)]
        is_labelled = any(label is not None for label in labels)
        indices[item] = tuple(number for row in rows for number in row) if is_labelled else None
    classes: list[str] = []
    for title, part in zip(titles, parts, strict=True):
        classes += [f"{title} {name}" for name in part.classes] if part is not None else []
    return SeveralLabels(
        target=", ".join(part.target for part in present),
        # All are read from one table: key, cases and rows are the same.
        key=present[0].key,
        classes=tuple(classes),
        indices=indices,
        cases=present[0].cases,
        rows=present[0].rows,
        notes=tuple(dict.fromkeys(note for part in present for note in part.notes)),
        titles=tuple(titles),
        parts=tuple(parts),
        numbers=tuple(numbers),
        are_class_indices=tuple(part is not None and _has_class_indices(part) for part in parts),
    )


def _has_class_indices(labels: Labels) -> bool:
    return any(isinstance(label, int) for label in labels.indices.values())


def _numbers(target: Target | None, count: int) -> tuple[float, ...]:
    """Return a label as ``count`` numbers: its own, or the index of its class; without a label, `MISSING_NUMBER`."""
    if target is None:
        return (MISSING_NUMBER,) * count
    return (float(target),) if isinstance(target, int) else target
