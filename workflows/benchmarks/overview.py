"""Draws the README's figure from a finished demo: a slide, its heatmap, a region, and the curves of the run.

python -m workflows.benchmarks.overview demo docs/overview.jpg
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from hyfi_core.plan.box import Box
from pathology.readers.sources import open_source

PANEL_PX, GAP_PX, CAPTION_PX = 440, 20, 52
INK, SOFT, ACCENT, SECOND = (32, 36, 48), (120, 126, 140), (176, 32, 80), (36, 96, 168)
SCALE = 2  # drawn at twice the size and reduced, which smooths lines


def main() -> None:
    """Draw the panels of the figure side by side with their captions, and write it."""
    demo, target = Path(sys.argv[1]), Path(sys.argv[2])
    slide_id, path, share = _clearest(demo)
    panels = [
        (_thumbnail(path), "a slide that was held out"),
        (
            _overlay(demo / "predictions" / slide_id / "overlay.png"),
            f"predicted {share}: the region with the highest score",
        ),
        (_focus(demo / "predictions" / slide_id / "regions.geojson", path), "this region at full resolution"),
        (_curves(demo / "run" / "metrics.jsonl"), "the run: loss at each step, AUROC at each validation"),
    ]
    width = len(panels) * PANEL_PX + (len(panels) + 1) * GAP_PX
    sheet = Image.new("RGB", (width, PANEL_PX + CAPTION_PX + GAP_PX), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (panel, caption) in enumerate(panels):
        x = GAP_PX + index * (PANEL_PX + GAP_PX)
        sheet.paste(panel.resize((PANEL_PX, PANEL_PX), Image.Resampling.LANCZOS), (x, GAP_PX))
        draw.text((x, GAP_PX + PANEL_PX + 14), caption, INK, ImageFont.load_default(16))
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target, quality=88)


def _clearest(demo: Path) -> tuple[str, Path, str]:
    """Return (slide id, file, class and probability in words) of the first positive prediction with a region."""
    with (demo / "predictions" / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["prediction"] == "malignant"]
    row = next(row for row in rows if _regions(demo / "predictions" / row["slide_id"] / "regions.geojson"))
    return row["slide_id"], Path(row["path"]), f"{row['prediction']} ({float(row['p_malignant']):.3f})"


def _regions(path: Path) -> list[Any]:
    features: list[Any] = json.loads(path.read_text(encoding="utf-8"))["features"]
    return features


def _thumbnail(path: Path) -> Image.Image:
    source = open_source(path)
    level = source.levels[1]
    pixels = source.read(Box.of_size(level.height_px, level.width_px), 1)
    source.close()
    return Image.fromarray(pixels)


def _overlay(path: Path) -> Image.Image:
    """Return the overlay without its legend."""
    image = Image.open(path).convert("RGB")
    # The legend is right of or below the map, which is square.
    side = min(image.size)
    return image.crop((0, 0, side, side))


def _focus(regions: Path, path: Path) -> Image.Image:
    """Return the pixels around the centre of a slide's first region."""
    ring = _regions(regions)[0]["geometry"]["coordinates"][0]
    xs, ys = [point[0] for point in ring], [point[1] for point in ring]
    source = open_source(path)
    height, width = source.levels[0].height_px, source.levels[0].width_px
    half = 160
    # Moved inwards where the crop would reach beyond the slide.
    y = min(max(int(sum(ys) / len(ys)), half), height - half)
    x = min(max(int(sum(xs) / len(xs)), half), width - half)
    pixels = source.read(Box(y - half, y + half, x - half, x + half), 0)
    source.close()
    return Image.fromarray(pixels)


def _curves(metrics: Path) -> Image.Image:
    """Return a square picture of the losses and AUROCs of a run; ``metrics``: its metrics.jsonl."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    aurocs = [
        (line["step"], line["auroc"]) for line in lines if line["kind"] == "validation" and line["auroc"] is not None
    ]
    side, edge = PANEL_PX * SCALE, 64 * SCALE
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(19 * SCALE)
    last, top = losses[-1][0], max(loss for _, loss in losses)

    def point_at(step: float, value: float, most: float) -> tuple[float, float]:
        return edge + step / last * (side - 2 * edge), side - edge - value / most * (side - 2 * edge)

    draw.line([(edge, edge), (edge, side - edge), (side - edge, side - edge)], SOFT, SCALE)
    draw.line([point_at(step, loss, top) for step, loss in losses], ACCENT, 2 * SCALE)
    draw.line([point_at(step, value, 1.0) for step, value in aurocs], SECOND, 3 * SCALE)
    for step, value in aurocs:
        x, y = point_at(step, value, 1.0)
        draw.ellipse((x - 5 * SCALE, y - 5 * SCALE, x + 5 * SCALE, y + 5 * SCALE), SECOND)
    draw.text((edge + 12, edge * 0.3), f"loss (0 to {top:.1f})", ACCENT, font)
    draw.text((side * 0.55, edge * 0.3), "AUROC (0 to 1)", SECOND, font)
    draw.text((side - edge - 110 * SCALE, side - edge * 0.8), f"step {last}", SOFT, font)
    return image


if __name__ == "__main__":
    main()
