"""One self-contained HTML page about one slide: what was predicted, from where, with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pathology.pages import FLAG_MEANINGS, render


@dataclass(frozen=True)
class ClassBar:
    """One class: probability 0 to 1, its spread over an ensemble (None for one model), a CSS colour."""

    name: str
    probability: float
    spread: float | None
    color: str


@dataclass(frozen=True)
class Flag:
    """Something about the slide that a reader must know."""

    name: str
    meaning: str


@dataclass(frozen=True)
class RegionPicture:
    """A region: its rank, a data URI, its mean score, area and place in words."""

    rank: int
    picture: str
    score: float
    area: str
    x: int
    y: int


@dataclass(frozen=True)
class Report:
    """All that the page says; pictures are data URIs, ``wide`` puts them below each other.

    ``withheld`` says why no class is given (empty: one is), ``partial`` that one is given though too little was seen.
    ``facts`` and the rows of ``provenance`` are (label, value); ``first`` is the index of the predicted class;
    ``off_tissue`` is the share, 0 to 1, of what speaks for it on glass.
    """

    slide_id: str
    case_id: str
    prediction: str
    withheld: str
    partial: bool
    coverage: float
    first: int
    classes: Sequence[ClassBar]
    probability_note: str
    facts: Sequence[tuple[str, str]]
    flags: Sequence[Flag]
    thumbnail: str
    overlay: str
    wide: bool
    logit: float
    bias: float
    off_tissue: float
    cell: str
    regions: Sequence[RegionPicture]
    crop: str
    provenance: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    made_at: str
    version: str


def render_report(report: Report) -> str:
    """Return the page as HTML; every text in it is escaped, nothing in it needs a network or a script."""
    return render("report.html", report=report, percent=percent, signed=signed)


def percent(share: float) -> str:
    """Return a share as text; what is not quite all or nothing is never rounded to it."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{share * 100:.1f} %"


def signed(value: float) -> str:
    """Return a number with its sign and three decimals; what rounds to nothing has a plus."""
    return f"{round(value, 3) + 0.0:+.3f}"


def area_text(area_um2: float) -> str:
    """Return an area in mm², with three significant digits, or a small one in whole µm²."""
    return f"{area_um2 / 1e6:.3g} mm²" if area_um2 >= 1e4 else f"{area_um2:.0f} µm²"


def flags_of(names: Sequence[str]) -> tuple[Flag, ...]:
    """Return flags with their meaning, where it is known."""
    return tuple(Flag(name, FLAG_MEANINGS.get(name, "")) for name in names)
