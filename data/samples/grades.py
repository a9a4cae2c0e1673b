"""Grades as labels: classes with an order, which is that of numbers, or is given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from data.missing import MISSING
from data.samples.labels import Labels, load_labels
from hyfi_core.errors import RequestError

_NUMBERED = re.compile(r"(\D*?)\s*(\d+(?:\.\d+)?)")
_ROMAN = {text: number for number, text in enumerate(("i", "ii", "iii", "iv", "v", "vi"), 1)}


def load_grades(
    csv: Path,
    target: str,
    *,
    classes: Sequence[str] | None = None,
    rows: Iterable[Mapping[str, str]] = (),
    merge_alike: bool = False,
    missing: Iterable[str] = MISSING,
) -> Labels:
    """Read the grade of each slide or case; the target of each is the index of its grade, the lowest first.

    Without ``classes``, grades are numbers (``1``, ``G2``, ``pT3``) or Roman numbers (``II``).

    Args:
        csv: The file.
        target: The column of grades.
        classes: The grades, the lowest first.
        rows: Rows of the store's manifest, whose names of slides and cases hold.
        merge_alike: Whether several spellings of one slide, case or grade are joined.
        missing: Words that mean that a value is missing.

    Raises:
        RequestError: As `load_labels`; or the grades have no order that is known.
    """
    labels = load_labels(csv, target, classes=classes, rows=rows, merge_alike=merge_alike, missing=missing)
    if classes is None:
        order = _order_of(labels.classes)
        if order is None:
            names = ", ".join(labels.classes)
            raise RequestError(
                f"{csv}: {target}: the order of {names} is not known: list them as model.classes, the lowest first, or "
                "use data.task: multiclass if they have none"
            )
        index = {old: new for new, old in enumerate(order)}
        indices = {item: index[one] if isinstance(one, int) else None for item, one in labels.indices.items()}
        labels = replace(labels, classes=tuple(labels.classes[old] for old in order), indices=indices)
    note = f"{target}: in this order: {' < '.join(labels.classes)}"
    return replace(labels, notes=(*labels.notes, note))


def _order_of(names: Sequence[str]) -> list[int] | None:
    """Return the indices of names in the order of their numbers; None: they are no numbers, or of several kinds."""
    found = [_numbered(name) for name in names]
    known = [one for one in found if one is not None]
    if len(known) < len(names) or len({kind for kind, _ in known}) > 1 or len(set(known)) < len(names):
        return None
    return sorted(range(len(names)), key=lambda k: known[k][1])


def _numbered(name: str) -> tuple[str, float] | None:
    """Return what stands before the number of a grade, and the number."""
    try:
        return "", float(name)
    except ValueError:
        pass
    prefix, _, last = name.casefold().rpartition(" ")
    if last in _ROMAN:
        return f"{prefix} roman", _ROMAN[last]
    found = _NUMBERED.fullmatch(name.casefold())
    return None if found is None else (found[1], float(found[2]))
