"""Fills in the report of one slide: numbers as texts, pictures as data URIs."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hyfi_core.plan.box import Box
from pathology.pages import data_uri
from pathology.predict.colors import class_color
from pathology.predict.members import InputSpec, Member
from pathology.predict.readout import ReadBar, Readout, percent
from pathology.predict.regions import LEAST_SHARE, Level0, RankedRegions, Region
from pathology.predict.report import RegionPicture, Report, ReportBar, area_text, flags_of
from pathology.predict.slide_result import SlideResult
from pathology.predict.tiles.top_tiles import top_tiles

PICTURE_PX = 1600
CROP_UM = 256.0
FactRows = list[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of a slide.

    Attributes:
        thumbnail: The slide.
        overlay: The slide with scores.
        tissue_squares: (rows, columns) mask of the heatmap's squares with tissue.
        blocks: The slide with the evidence of its blocks; None: it has none.
    """

    thumbnail: Image.Image
    overlay: Image.Image
    tissue_squares: NDArray[np.bool_]
    blocks: Image.Image | None = None


def fill_report(
    result: SlideResult,
    members: Sequence[Member],
    spec: InputSpec,
    pictures: Pictures,
    regions: RankedRegions,
    level0: Level0,
) -> Report:
    """Return the report of a slide; the pictures of its regions are read from the store.

    Raises:
        StoreError: The store is damaged.
    """
    heatmap, readout, channel = result.heatmap, result.readout, result.channel
    bars = readout.bars(result.mean)
    return Report(
        slide_id=result.slide_id,
        case_id=result.case_id,
        prediction=readout.prediction(result.mean),
        verdict=readout.verdict(result.mean),
        channel=readout.channels[channel],
        withheld=result.withheld,
        partial=bool(not result.withheld and "incomplete" in result.flags),
        coverage=result.coverage,
        first=readout.main_bar(result.mean),
        bars=[
            ReportBar(bar.name, bar.share, bar.text, _spread(result, bar, place), _css(bar.channel))
            for place, bar in enumerate(bars)
        ],
        exclusive=readout.exclusive,
        note=_note(readout, members),
        facts=_facts(result, spec),
        flags=flags_of(result.flags, {"outside_training": result.outside}),
        thumbnail=data_uri(pictures.thumbnail, PICTURE_PX),
        overlay=data_uri(pictures.overlay, PICTURE_PX),
        wide=pictures.thumbnail.width > 1.4 * pictures.thumbnail.height,
        logit=heatmap.logits[channel],
        bias=heatmap.bias[channel],
        off_tissue=_off_tissue(heatmap.positive_contributions(channel), pictures.tissue_squares),
        square=f"{heatmap.square_um[1]:.3g} × {heatmap.square_um[0]:.3g} µm",
        regions=[_region(result, region, level0) for region in regions.listed],
        regions_left_out=_left_out(regions),
        crop=f"{CROP_UM:g} µm",
        of_tiles=heatmap.of_tiles,
        mapped=heatmap.mapped,
        tiles=top_tiles(result),
        weighed=heatmap.attention is not None,
        evidence="" if pictures.blocks is None else data_uri(pictures.blocks, PICTURE_PX),
        evidence_kind="" if result.blocks is None else result.blocks.kind,
        blocks="" if result.blocks is None else f"{result.blocks.blocks:,} of {result.blocks.size_text}",
        provenance=[
            ("Slide", _slide_rows(result)),
            *((_member_title(k, len(members)), _member_rows(member)) for k, member in enumerate(members)),
            ("Software", _software_rows()),
        ],
        made_at=f"{datetime.now(UTC):%d %B %Y, %H:%M} UTC".lstrip("0"),
        version=importlib.metadata.version("hyfi"),
    )


def _off_tissue(contributions: NDArray[np.float64], tissue: NDArray[np.bool_]) -> float:
    """Return the fraction of positive contributions that is outside of tissue."""
    total = float(contributions.sum())
    # Without positive contributions there is nothing to be outside.
    return float(contributions[~tissue].sum()) / total if total > 0 else 0.0


def _css(index: int) -> str:
    return "rgb({}, {}, {})".format(*class_color(index))


def _note(readout: Readout, members: Sequence[Member]) -> str:
    return readout.note(
        len(members), [member.config["calibration"] for member in members if member.config.get("calibration")]
    )


def _spread(result: SlideResult, bar: ReadBar, place: int) -> str:
    """Return the spread over an ensemble of the number of a bar, as text; ``place``: of the bar among all."""
    spread, column = result.spread, place if bar.column is None else bar.column
    return "" if spread is None or column >= len(spread) else result.readout.spread_text(float(spread[column]), column)


def _facts(result: SlideResult, spec: InputSpec) -> FactRows:
    """Return rows (label, value) about the part of a slide that the model has seen."""
    height, width = spec.size_px
    mpp_y, mpp_x = result.heatmap.mpp
    stains = [] if spec.stain is None else [("Stains", f"normalised: {spec.stain.method}")]
    stains = [("Stains", "as scanned")] if "stain_as_scanned" in result.flags else stains
    if result.tiles is not None:
        tiles = result.tiles
        stride = "" if tiles.stride_px == tiles.size_px else f", {tiles.stride_px} px apart"
        return [
            ("Tissue", area_text(result.views[0].tissue_px * mpp_y * mpp_x)),
            ("Tissue in tiles", percent(result.coverage)),
            ("Tiles", f"{len(tiles):,} of {tiles.size_px} × {tiles.size_px} px at {mpp_x:.3g} µm per pixel{stride}"),
            *stains,
        ]
    pieces = sum(len(view.pieces) for view in result.views)
    shown = result.views[0].size_px
    trained = "" if shown == spec.size_px else f"; trained with {width} × {height} px"
    times = f"{len(result.views)} × " if len(result.views) > 1 else ""
    return [
        ("Tissue", area_text(result.views[0].tissue_px * mpp_y * mpp_x)),
        ("Tissue seen", percent(result.coverage)),
        ("Image", f"{times}{shown[1]} × {shown[0]} px at {mpp_x:.3g} µm per pixel{trained}"),
        *stains,
        ("Pieces", f"{pieces} part{'' if pieces == 1 else 's'} of the slide, unscaled"),
        *([("Combined by", result.combined)] if result.combined else []),
    ]


def _left_out(regions: RankedRegions) -> str:
    """Return how many regions are not listed, and why, as a sentence; empty if all are."""
    counts = [
        (regions.beyond, "of lower score"),
        (regions.faint, f"with less than {LEAST_SHARE * 100:g} % of the evidence each"),
    ]
    words = [f"{n:,} region{'s' * (n != 1)} {reason}" for n, reason in counts if n]
    return f"Neither listed nor outlined: {' and '.join(words)}." if words else ""


def _region(result: SlideResult, region: Region, level0: Level0) -> RegionPicture:
    """Return a region with its picture and its position in level-0 pixels."""
    heatmap = result.heatmap
    # + 0.5: square 0 lies from 0 to 1.
    row, column = (float(part.mean()) + 0.5 for part in region.squares)
    x, y = level0.point(column, row, heatmap)
    return RegionPicture(
        rank=region.rank,
        picture=_crop(result, region),
        score=region.score,
        evidence="" if region.share is None else percent(region.share),
        area=area_text(region.area_um2),
        x=round(x),
        y=round(y),
    )


def _crop(result: SlideResult, region: Region) -> str:
    """Return a picture, as a data URI, of ``CROP_UM`` × ``CROP_UM`` around the region's peak, at the finest level."""
    finest, model_mpp = result.slide.levels[0], result.heatmap.mpp
    square_px = result.heatmap.square_px
    # At least 32 pixels, even if the store is coarse.
    sides = [max(32, round(CROP_UM / mpp)) for mpp in finest.mpp]
    centre = [
        # From squares to pixels at the model's resolution, then to pixels of the store's finest level.
        round((peak + 0.5) * square_px * coarse / fine)
        for peak, coarse, fine in zip(region.peak, model_mpp, finest.mpp, strict=True)
    ]
    y0, x0 = (
        # At the border, move the box inside the slide, so that all pictures have the same size.
        max(0, min(middle - side // 2, length - side))
        for middle, side, length in zip(centre, sides, (finest.height_px, finest.width_px), strict=True)
    )
    pixels = result.slide.read(Box(y0, y0 + sides[0], x0, x0 + sides[1]))
    return data_uri(Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))), 512)


def _slide_rows(result: SlideResult) -> FactRows:
    """Return the facts about a slide's file."""
    attributes = result.slide.attributes
    source: dict[str, Any] = attributes["source"]
    scanned, (height, width) = source["levels"][0], result.heatmap.slide_size_px
    stated = {"file": "stated in the file", "manifest": "from the manifest", "flag": "given by the user"}
    rows: FactRows = [
        ("file", PurePath(result.path).name),
        ("size", f"{scanned['width_px']} × {scanned['height_px']} px"),
        ("µm per pixel", f"{np.mean(source['mpp']):.4g}, {stated.get(source['mpp_from'], source['mpp_from'])}"),
        ("predicted at", f"{width} × {height} px of {result.heatmap.mpp[1]:.4g} µm"),
        ("vendor", str(source["vendor"])),
        ("sha256", str(attributes["sha256"])),
    ]
    return rows


def _member_title(index: int, count: int) -> str:
    return "Model" if count == 1 else f"Model {index + 1} of {count}"


def _member_rows(member: Member) -> FactRows:
    """Return the facts about a model."""
    config = member.config
    rows: FactRows = [
        ("model", str(config.get("model", {}).get("name", ""))),
        ("checkpoint", member.path),
        ("digest", member.digest),
    ]
    if "step" in config:
        rows.append(("trained for", f"{config['step']} steps"))
    if config.get("versions"):
        rows.append(("trained with", ", ".join(f"{name} {text}" for name, text in config["versions"].items())))
    return rows


def _software_rows() -> FactRows:
    names = ("hyfi", "torch", "numpy", "zarr", "openslide-python", "tifffile")
    rows = [(name, importlib.metadata.version(name)) for name in names]
    return [*rows, ("Python", platform.python_version()), ("system", f"{platform.system()} {platform.machine()}")]
