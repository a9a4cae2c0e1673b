"""Slides made for a test: real tiled TIFFs of known pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tifffile

RGB = npt.NDArray[np.uint8]
MakeSlide = Callable[..., Path]


def halved(image: RGB) -> RGB:
    height, width = image.shape[0] // 2 * 2, image.shape[1] // 2 * 2
    blocks = image[:height, :width].reshape(height // 2, 2, width // 2, 2, 3).astype(np.uint16)
    return ((blocks.sum((1, 3)) + 2) // 4).astype(np.uint8)


def write_slide(
    path: Path, image: RGB, mpp: float | None = 0.5, levels: int = 1, compression: str = "zlib", tile_px: int = 256
) -> Path:
    """Write ``(h, w, 3)`` uint8 as a tiled, pyramidal TIFF."""
    resolution = None if mpp is None else (1e4 / mpp, 1e4 / mpp)
    with tifffile.TiffWriter(path) as tiff:
        for level in range(levels):
            tiff.write(
                image,
                photometric="rgb",
                tile=(tile_px, tile_px),
                compression=compression,
                resolution=resolution,
                resolutionunit="CENTIMETER" if resolution else None,
                subfiletype=1 if level else 0,
                metadata=None,
            )
            image = halved(image)
            resolution = None
    return path


def stained(height: int, width: int, seed: int = 0) -> RGB:
    """Return glass with one piece of pink, grainy tissue in the middle."""
    rng = np.random.default_rng(seed)
    image = np.full((height, width, 3), 243, np.uint8)
    y, x = slice(height // 4, height * 3 // 4), slice(width // 4, width * 3 // 4)
    shape = image[y, x].shape[:2]
    grain = rng.integers(0, 60, shape)
    image[y, x] = np.stack([200 - grain // 2, 120 - grain, 180 - grain // 2], -1)
    return image
