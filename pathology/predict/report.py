"""The HTML report of one slide, a single file without external resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pathology.pages import FLAG_MEANINGS, render
from pathology.predict.readout import percent


@dataclass(frozen=True)
class ReportBar:
    """A line: its name, the share of its bar, 0 to 1, its value as text, and a CSS colour.

    ``spread``: the standard deviation over an ensemble as text; empty for one model.
    """

    name: str
    share: float
    text: str
    spread: str
    color: str


@dataclass(frozen=True)
class Flag:
    """A warning about the slide, with its description."""

    name: str
    meaning: str


@dataclass(frozen=True)
class RegionPicture:
    """A region.

    Attributes:
        rank: By score, from 1.
        picture: A data URI.
        score: Mean score of its squares, 0 to 1.
        evidence: Its share of the positive contribution to the logit, as text; empty if no square contributes.
        area: Area of its squares, as text.
        x, y: Centre in level-0 pixels of QuPath.
    """

    rank: int
    picture: str
    score: float
    evidence: str
    area: str
    x: int
    y: int


@dataclass(frozen=True)
class TilePicture:
    """A tile.

    Attributes:
        rank: From 1.
        picture: A data URI.
        weight: Its attention, relative to the average tile, as text; else its contribution to the logit.
        score: Score of the channel that is shown, 0 to 1.
        x, y: Centre in level-0 pixels of QuPath.
    """

    rank: int
    picture: str
    weight: str
    score: float
    x: int
    y: int


@dataclass(frozen=True)
class Report:
    """Values of the report's template.

    Attributes:
        slide_id, case_id: The slide.
        prediction: The prediction as text, such as the predicted class.
        verdict: The text beside it, such as its probability.
        channel: Name of the heatmap's channel that is shown.
        withheld: Why there is no prediction; empty if there is one.
        partial: Whether a prediction is given though less tissue was seen than required.
        coverage: Fraction of the tissue that was seen, 0 to 1.
        first: Index of the bar that is emphasised.
        bars: Lines of numbers.
        exclusive: Whether scores of all channels sum to 1.
        note: How the numbers were computed.
        facts: Rows (label, value) about what was seen.
        flags: Warnings.
        thumbnail, overlay: Pictures of the slide, as data URIs.
        wide: Whether pictures are placed below each other.
        logit, bias: Output of the channel, and its bias.
        off_tissue: Fraction, 0 to 1, of the positive contributions to the channel that are outside of tissue.
        square: Size of the heatmap's squares, as text.
        regions: Regions where the channel scores highest, by score.
        regions_left_out: How many regions are not listed, as a sentence; empty if all are.
        crop: Size of their pictures, as text.
        provenance: Sections (title, rows) about slide, models and software.
        made_at, version: When and with which version of hyfi the report was made.
        of_tiles: Whether the model has an encoder of tiles.
        mapped: Whether the model has a map whose positions have scores.
        tiles: The tiles that weigh most; empty without an encoder of tiles.
        weighed: Whether they are those with most attention; otherwise those that contribute most.
        evidence: Picture of the drops of the channel's output without each block, as a data URI; empty: none.
        evidence_kind: ``occlusion``: they are measured; ``gradient``: they are estimated.
        blocks: Number and size of these blocks, as text.
    """

    slide_id: str
    case_id: str
    prediction: str
    verdict: str
    channel: str
    withheld: str
    partial: bool
    coverage: float
    first: int
    bars: Sequence[ReportBar]
    exclusive: bool
    note: str
    facts: Sequence[tuple[str, str]]
    flags: Sequence[Flag]
    thumbnail: str
    overlay: str
    wide: bool
    logit: float
    bias: float
    off_tissue: float
    square: str
    regions: Sequence[RegionPicture]
    regions_left_out: str
    crop: str
    provenance: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    made_at: str
    version: str
    of_tiles: bool = False
    mapped: bool = True
    tiles: Sequence[TilePicture] = ()
    weighed: bool = False
    evidence: str = ""
    evidence_kind: str = ""
    blocks: str = ""


def render_report(report: Report) -> str:
    """Return the report as HTML. Texts are escaped; it has no scripts and no external resources."""
    return render("report.html", report=report, percent=percent, signed=signed)


def signed(value: float) -> str:
    """Return a number with sign and three decimals; zero has a plus."""
    return f"{round(value, 3) + 0.0:+.3f}"


def area_text(area_um2: float) -> str:
    """Return an area in mm² with three significant digits; below 10,000 µm² in whole µm²."""
    return f"{area_um2 / 1e6:.3g} mm²" if area_um2 >= 1e4 else f"{area_um2:.0f} µm²"


def flags_of(names: Sequence[str], details: Mapping[str, str] | None = None) -> tuple[Flag, ...]:
    """Return flags with their descriptions, which are empty for unknown flags, and with details of this slide."""
    texts = {name: (FLAG_MEANINGS.get(name, ""), (details or {}).get(name, "")) for name in names}
    return tuple(Flag(name, ". ".join(filter(None, texts[name]))) for name in names)
