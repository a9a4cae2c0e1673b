"""Grades as labels: classes in the order of their numbers, or in a given order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from data.samples.labels import Labels
from hyfi_core.errors import RequestError

_NUMBERED = re.compile(r"(\D*?)\s*(\d+(?:\.\d+)?)")
_ROMAN = {text: number for number, text in enumerate(("i", "ii", "iii", "iv", "v", "vi"), 1)}


def in_order(labels: Labels, source: str, *, is_given: bool) -> Labels:
    """Return labels whose classes are grades in ascending order, with a note that states the order.

    Args:
        labels: The grades as classes.
        source: The file, for messages.
        is_given: True: the classes are in order already. False: sort them by their numbers (``1``, ``G2``, ``pT3``) or
            Roman numbers (``II``).

    Raises:
        RequestError: The names of the grades do not show their order.
    """
    if not is_given:
        order = _order_of(labels.classes)
        if order is None:
            names = ", ".join(labels.classes)
            raise RequestError(
                f"{source}: {labels.target}: the order of {names} is not known: list them as model.classes, the lowest "
                "first, or use data.task: multiclass if they have none"
            )
        index = {number: rank for rank, number in enumerate(order)}
        indices = {item: index[target] if isinstance(target, int) else None for item, target in labels.indices.items()}
        labels = replace(labels, classes=tuple(labels.classes[number] for number in order), indices=indices)
    note = f"{labels.target}: in this order: {' < '.join(labels.classes)}"
    return replace(labels, notes=(*labels.notes, note))


def _order_of(names: Sequence[str]) -> list[int] | None:
    """Return the indices of names in the order of their numbers: ``[1, 0]`` for G2, G1; None if they have no order."""
    grades = [_numbered(name) for name in names]
    numbered = [grade for grade in grades if grade is not None]
    # All names must be of one kind ("G2" and "pT3" have no common order) and have different numbers.
    if len(numbered) < len(names) or len({kind for kind, _ in numbered}) > 1 or len(set(numbered)) < len(names):
        return None
    return sorted(range(len(names)), key=lambda k: numbered[k][1])


def _numbered(name: str) -> tuple[str, float] | None:
    """Return (text before the number, number) of a grade: ``("g", 2.0)`` for ``G2``; None if it has no number.

    Before a Roman number, the text ends with ``roman``: ``G II`` and ``G2`` have no common order.
    """
    try:
        return "", float(name)
    except ValueError:
        pass
    prefix, _, last = name.casefold().rpartition(" ")
    if last in _ROMAN:
        return f"{prefix} roman", _ROMAN[last]
    match = _NUMBERED.fullmatch(name.casefold())
    return None if match is None else (match[1], float(match[2]))
