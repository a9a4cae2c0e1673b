"""Small stored slides for tests of tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.store.layout import LevelSize, pyramid_levels
from data.store.slide_store import SlideStore, slide_path
from data.store.writer import SlideWriter

SIZES = [LevelSize(1101, 4301), LevelSize(551, 2151), LevelSize(276, 1076)]
AFFINE = [[2.5, 0.0, 40.0], [0.0, 2.5, 7.0]]
SOURCE = {"mpp": [0.4, 0.4], "objective_power": None, "bounds": {"y0": 40, "y1": 2793, "x0": 7, "x1": 10760}}


def write_slide(store: Path, slide_id: str, mask: np.ndarray, seed: int = 7, source: str | None = None) -> SlideStore:
    """Write a slide of noise in two files, with a mask of 8 µm per pixel; ``source``: digest of its file."""
    rng = np.random.default_rng(seed)
    with SlideWriter(store, slide_id, pyramid_levels(SIZES, 1.0)) as writer:
        for k, size in enumerate(SIZES):
            pixels = rng.integers(0, 256, (3, size.height_px, size.width_px), dtype=np.uint8)
            for x in range(0, pixels.shape[2], 4096):
                writer.write(k, 0, x, pixels[:, :, x : x + 4096])
        writer.write_tissue(mask, 8.0)
        writer.publish({"kind": "resampled", "affine": AFFINE, "source": SOURCE, "sha256": source})
    return SlideStore.open(slide_path(store, slide_id))
