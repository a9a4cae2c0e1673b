"""Statements of a slide's file about its pixel size, and notes on contradictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

APERIO = "Aperio's text"
"""Where Aperio's programs state microns per pixel."""


@dataclass(frozen=True, slots=True)
class StatedMpp:
    """Microns per pixel (y, x) as one place of a file states them.

    Attributes:
        um: Microns per pixel (y, x) of the finest level.
        where: The place, such as ``OME-XML`` or ``the resolution tags``.
        of_px: (height, width) of the image that the place describes; None if it does not state it.
        repaired: What had to be corrected to read it: ``the unit 'Âµm' is read as µm``; else empty.
    """

    um: tuple[float, float]
    where: str
    of_px: tuple[int, int] | None = None
    repaired: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A contradiction in a file and what was believed: the slide's flag, and a sentence with both values."""

    flag: str
    text: str


@dataclass(frozen=True, slots=True)
class SlideFacts:
    """Statements of a file, doubts and notes.

    Attributes:
        mpp: Every statement of microns per pixel, the most trusted place first.
        mpp_doubt: Why none of them is believed, with the values that contradict each other; else empty.
        notes: Contradictions that were settled.
    """

    mpp: tuple[StatedMpp, ...] = ()
    mpp_doubt: str = ""
    notes: tuple[Note, ...] = ()

    def noting(self, *notes: Note) -> SlideFacts:
        """Return the facts with more notes."""
        return replace(self, notes=self.notes + notes)

    def to_json(self) -> dict[str, Any]:
        """Return the facts for a slide's attributes."""
        return {
            "mpp": [{"um": list(stated.um), "where": stated.where} for stated in self.mpp],
            "notes": [note.text for note in self.notes],
        }


def merged(stated: tuple[StatedMpp, ...], more: tuple[StatedMpp, ...]) -> tuple[StatedMpp, ...]:
    """Return both without a place that occurs twice: two readers may have read it."""
    by_place: dict[str, StatedMpp] = {}
    for statement in (*stated, *more):
        by_place.setdefault(statement.where, statement)
    return tuple(by_place.values())
