"""The folder of one slide's results: heatmap, overlay, regions, report; written beside and renamed when whole.

```
DIR/<slide_id>/heatmap.tiff  overlay.png  regions.geojson  report.html  prediction.json
```
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.files import publish_directory, remove_leftovers, sync_file, temporary_beside
from data.store import SlideStore
from hyfi_core.plan.box import Box
from pathology.heatmap_tiff import write_heatmap
from pathology.overlay import Overlay, draw_overlay, tissue_cells
from pathology.recipe import Member, Recipe
from pathology.regions import find_regions, to_geojson, write_regions
from pathology.report import render_report
from pathology.slide_report import Pictures, fill_report
from pathology.slide_result import SlideResult, level0_of

PREDICTION_FILE = "prediction.json"
OVERLAY_PX = 1920  # the legend goes below; with it a square slide's picture stays under 2048 px


def write_results(
    folder: Path, result: SlideResult, members: Sequence[Member], recipe: Recipe, key: Mapping[str, Any]
) -> None:
    """Write a slide's folder beside ``folder`` and rename it; an older one is replaced.

    Args:
        folder: ``DIR/<slide_id>``.
        result: what is known.
        members: who predicted.
        recipe: how they looked.
        key: goes to ``prediction.json``; a run that would have the same key need not do the slide again.

    Raises:
        OSError: nothing new is left behind then.
    """
    remove_leftovers(folder)
    beside = temporary_beside(folder)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        _write_files(beside, result, members, recipe, key)
        for path in (*beside.iterdir(), beside):
            sync_file(path)
        publish_directory(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_files(
    folder: Path, result: SlideResult, members: Sequence[Member], recipe: Recipe, key: Mapping[str, Any]
) -> None:
    heatmap, predicted = result.heatmap, result.predicted
    about = {
        "checkpoints": [member.digest for member in members],
        "probabilities": result.mean.tolist(),
        "coverage": result.view.coverage,
        "flags": list(result.flags),
    }
    write_heatmap(folder / "heatmap.tiff", heatmap, result.slide_id, about)
    thumb = thumbnail(result.slide, OVERLAY_PX)
    mask, _ = result.slide.tissue()
    cells = tissue_cells(mask, heatmap)
    regions = find_regions(heatmap, predicted, cells)
    overlay = draw_overlay(Overlay(thumb, heatmap, predicted, mask, regions))
    overlay.save(folder / "overlay.png", optimize=False, compress_level=6)
    level0 = level0_of(result)
    write_regions(
        folder / "regions.geojson", to_geojson(regions, heatmap, predicted, slide_id=result.slide_id, level0=level0)
    )
    report = fill_report(result, members, recipe, Pictures(Image.fromarray(thumb), overlay, cells), regions, level0)
    (folder / "report.html").write_text(render_report(report), encoding="utf-8")
    text = json.dumps({"key": dict(key), "slide_id": result.slide_id, **about}, ensure_ascii=False, indent=1)
    (folder / PREDICTION_FILE).write_text(text + "\n", encoding="utf-8")


def thumbnail(slide: SlideStore, longest_px: int) -> NDArray[np.uint8]:
    """Return the whole slide as (h, w, 3) uint8, its longer side at most ``longest_px``; never enlarged.

    Memory: the coarsest level that is not smaller, so less than ``3 * (2 * longest_px)**2`` bytes where levels halve.
    """
    fitting = [k for k, level in enumerate(slide.levels) if max(level.height_px, level.width_px) >= longest_px]
    chosen = fitting[-1] if fitting else 0
    size = slide.levels[chosen]
    pixels = slide.read(Box.of_size(size.height_px, size.width_px), chosen).transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((longest_px, longest_px), Image.Resampling.LANCZOS, reducing_gap=None)
    return np.asarray(image)
