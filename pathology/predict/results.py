"""Writes the folder of one slide's results atomically: heatmap, overlay, regions, report.

```
DIR/<slide_id>/heatmap.tiff  scores.tiff  overlay.png  thumbnail.jpg  regions.geojson  report.html  prediction.json
               occlusion.tiff  occlusion.png   or  gradient.tiff  gradient.png   if requested
```
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.files import publish_directory, remove_leftovers, temporary_path
from hyfi_core.files import sync_file
from pathology.ingest.thumbnail import thumbnail_of_store
from pathology.predict.evidence.evidence_tiff import write_evidence
from pathology.predict.evidence.picture import draw_evidence
from pathology.predict.heatmap_tiff import write_heatmap, write_score_picture
from pathology.predict.members import InputSpec, Member
from pathology.predict.overlay import Overlay, draw_overlay, tissue_squares
from pathology.predict.regions import (
    RankedRegions,
    contour_features,
    find_regions,
    tissue_features,
    to_geojson,
    write_regions,
)
from pathology.predict.report import render_report
from pathology.predict.slide_report import Pictures, fill_report
from pathology.predict.slide_result import (
    SlideResult,
    evidence_of,
    heatmap_to_level0,
    level0_of,
    origin_um,
    squares_to_level0,
)
from pathology.predict.table import PREDICTION_FILE, SOURCE_FILE

THUMBNAIL_FILE = "thumbnail.jpg"
THUMBNAIL_PX = 128
OVERLAY_PX = 1920  # with the legend below it, the picture of a square slide has less than 2048 px
LEAST_WIDTH_PX = 480  # narrower pictures are enlarged, as far as `OVERLAY_PX` allows: a legend needs the width


def write_results(
    folder: Path, result: SlideResult, members: Sequence[Member], spec: InputSpec, key: Mapping[str, Any]
) -> None:
    """Write a slide's results to a temporary folder and rename it; an existing ``folder`` is replaced.

    Args:
        folder: ``DIR/<slide_id>``.
        result: Result of the slide.
        members: The models.
        spec: Their common input.
        key: All that the results depend on, stored in ``prediction.json``. A later run with the same key skips the
            slide.

    Raises:
        OSError: The folder cannot be written; an existing one is unchanged.
    """
    remove_leftovers(folder)
    temporary = temporary_path(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_files(temporary, result, members, spec, key)
        # Sync the files, then their folder, before the folder gets its final name.
        for path in (*temporary.iterdir(), temporary):
            sync_file(path)
        publish_directory(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_files(
    folder: Path, result: SlideResult, members: Sequence[Member], spec: InputSpec, key: Mapping[str, Any]
) -> None:
    """Write the files of a slide into a new folder."""
    heatmap, channel = result.heatmap, result.channel
    metadata = {
        "checkpoints": [member.digest for member in members],
        **result.readout.metadata(result.mean, result.uncalibrated.mean(axis=0)),
        "outputs": result.outputs.tolist(),
        "temperatures": [member.temperature for member in members],
        "coverage": result.coverage,
        "flags": list(result.flags),
        "images": [list(view.size_px) for view in result.views],
        "combined": result.combined,
        "evidence": evidence_of(result),
        "source_mpp": result.slide.attributes.get("source", {}).get("mpp"),
    }
    with_position = metadata | {"cell_to_level0": heatmap_to_level0(result)}
    mask, mask_mpp = result.slide.tissue()
    squares = tissue_squares(mask, mask_mpp, heatmap)
    # Remove scores of glass, which mean nothing: viewers would show them as colours.
    on_tissue = replace(heatmap, scores=np.where(squares, heatmap.scores, np.float32(np.nan)))
    if heatmap.mapped:
        write_heatmap(folder / "heatmap.tiff", on_tissue, result.slide_id, with_position, origin_um(result))
    thumb = wide_enough(thumbnail_of_store(result.slide, OVERLAY_PX).image)
    covered = _write_evidence(folder, result, thumb, metadata)
    shown = heatmap.mapped and not result.withheld
    regions = find_regions(heatmap, channel, squares, fold=members[0].pooling != "max") if shown else RankedRegions()
    overlay = draw_overlay(Overlay(thumb, heatmap, shown, mask, mask_mpp, regions))
    overlay.save(folder / "overlay.png", optimize=False, compress_level=6)
    small = overlay.crop((0, 0, thumb.shape[1], thumb.shape[0]))  # without the legend
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.LANCZOS)
    small.save(folder / THUMBNAIL_FILE, quality=80)
    level0 = level0_of(result)
    collection = to_geojson(regions.listed, heatmap, channel, slide_id=result.slide_id, level0=level0)
    collection["features"] += tissue_features(mask, mask_mpp, heatmap, slide_id=result.slide_id, level0=level0)
    if shown:
        collection["features"] += contour_features(heatmap, channel, squares, slide_id=result.slide_id, level0=level0)
    write_regions(folder / "regions.geojson", collection)
    if shown:
        write_score_picture(folder / "scores.tiff", on_tissue)
    pictures = Pictures(Image.fromarray(thumb), overlay, squares, covered)
    report = fill_report(result, members, spec, pictures, regions, level0)
    (folder / "report.html").write_text(render_report(report), encoding="utf-8", errors="backslashreplace")
    # A viewer compares these to see whether a slide with this name is the predicted one.
    file = {name: result.slide.attributes.get(name) for name in SOURCE_FILE}
    named = {"key": dict(key), "slide_id": result.slide_id, "label": result.label, "source_file": file}
    text = json.dumps({**named, **metadata}, ensure_ascii=False, indent=1)
    (folder / PREDICTION_FILE).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def wide_enough(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a picture (h, w, 3), enlarged by a whole number if it is too narrow for a legend."""
    height, width = picture.shape[:2]
    factor = -(-LEAST_WIDTH_PX // width)
    # A picture is not enlarged beyond the longest side of others, however narrow the slide is.
    factor = max(1, min(factor, OVERLAY_PX // height))
    return np.asarray(Image.fromarray(picture).resize((factor * width, factor * height), Image.Resampling.BICUBIC))


def _write_evidence(
    folder: Path, result: SlideResult, thumbnail: NDArray[np.uint8], metadata: Mapping[str, Any]
) -> Image.Image | None:
    """Write the evidence of a slide's blocks, if it has one, and return its picture."""
    evidence = result.blocks
    if evidence is None:
        return None
    facts = {**metadata, "cell_to_level0": squares_to_level0(result, evidence.block_px)}
    write_evidence(folder / f"{evidence.kind}.tiff", evidence, result.slide_id, facts, origin_um(result))
    picture = draw_evidence(thumbnail, evidence, result.channel, result.heatmap.slide_size_px)
    picture.save(folder / f"{evidence.kind}.png", optimize=False, compress_level=6)
    return picture
