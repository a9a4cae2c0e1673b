"""Artefacts of synthetic slides: marks of a felt pen, and an area out of focus."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy import ndimage

from hyfi_core.plan.box import Box
from pathology.synthetic.anatomy import SlideSpec
from pathology.synthetic.fields import Field

BLUR_REACH_PX = 20
_INKS = np.array(
    [[0.16, 0.28, 0.62], [0.12, 0.42, 0.24], [0.15, 0.15, 0.17]]
)  # blue, green, black: transmitted fraction of red, green and blue light


class Artefacts:
    """The pen marks and the out-of-focus area of one slide, if its spec asks for them."""

    def __init__(self, spec: SlideSpec) -> None:
        rng = spec.rng(3)
        self.ink = _INKS[int(rng.integers(0, len(_INKS)))].astype(np.float32)
        self.strokes = _strokes(rng, spec.size_px) if spec.pen else []
        # No pen is finer than 20 µm, however small the slide.
        self.half_width_px = max(0.011 * spec.size_px, 10.0 / spec.mpp_um)
        self.centre = rng.uniform(0.3, 0.7, 2) * spec.size_px
        self.radius_px = rng.uniform(0.18, 0.26) * spec.size_px if spec.blur else 0.0
        self.sigma_px = 2.2 / spec.mpp_um

    def blur(self, planes: tuple[Field, ...], box: Box) -> tuple[Field, ...]:
        """Return the planes of ``box``, blurred inside the slide's out-of-focus disc; unchanged outside of it."""
        if not self.radius_px:
            return planes
        y = np.arange(box.y0, box.y1, dtype=np.float32)[:, None] - np.float32(self.centre[0])
        x = np.arange(box.x0, box.x1, dtype=np.float32)[None, :] - np.float32(self.centre[1])
        # A soft edge of 60 pixels: a sharp one would be a detail by itself.
        weight = np.clip((self.radius_px - np.hypot(y, x)) / 60, 0, 1)
        if not weight.any():
            return planes
        return tuple(self._blurred(plane, weight) for plane in planes)

    def _blurred(self, plane: Field, weight: Field) -> Field:
        """Blend a plane with its blurred version; weight 1 is fully blurred."""
        sharp = plane.astype(np.float32)
        soft = ndimage.gaussian_filter(sharp, self.sigma_px, mode="nearest", truncate=3)
        result: Field = (sharp + weight * (soft - sharp) + 0.5).astype(np.uint8)
        return result

    def pen(self, pixels: Field, block: Box) -> Field:
        """Return the pixels of ``block`` with the ink over them; the same array if there is none."""
        for points in self.strokes:
            for start, end in pairwise(points):
                if not self._touches(block, start, end):
                    continue
                distance = _distance(block, start, end)
                opacity = np.clip((self.half_width_px - distance) / 3, 0, 1)[..., None] * np.float32(0.93)
                # Ink darkens: over dark tissue the tissue stays visible.
                inked = np.minimum(pixels, 245 * self.ink + 0.1 * pixels)
                pixels = (pixels + opacity * (inked - pixels)).astype(np.uint8)
        return pixels

    def inked(self, mpp_um: float, source_mpp_um: float, side_px: int) -> Field:
        """Return the mask of the ink, ``(side_px, side_px)`` bool, of the whole slide at ``mpp_um``."""
        scale = source_mpp_um / mpp_um
        extent = Box.of_size(side_px, side_px)
        inked_mask = np.zeros((side_px, side_px), bool)
        for points in self.strokes:
            # Minus 0.5: `_distance` measures from the index of a pixel, and its centre is half a pixel further.
            for start, end in pairwise(points * scale - 0.5):
                inked_mask |= _distance(extent, start, end) < self.half_width_px * scale
        return inked_mask

    def unsharp(self, mpp_um: float, source_mpp_um: float, side_px: int) -> Field:
        """Return the mask of the out-of-focus area, ``(side_px, side_px)`` bool, of the whole slide at ``mpp_um``."""
        centres = (np.arange(side_px) + 0.5) * mpp_um / source_mpp_um
        y, x = centres[:, None] - self.centre[0], centres[None, :] - self.centre[1]
        result: Field = np.hypot(y, x) < self.radius_px
        return result

    def _touches(self, block: Box, start: Field, end: Field) -> bool:
        """Whether a stroke's bounding box intersects a block."""
        low, high = np.minimum(start, end) - self.half_width_px, np.maximum(start, end) + self.half_width_px
        return bool(high[0] > block.y0 and low[0] < block.y1 and high[1] > block.x0 and low[1] < block.x1)


def _distance(block: Box, start: Field, end: Field) -> Field:
    """Return each pixel's distance to a line segment, in pixels."""
    y = np.arange(block.y0, block.y1, dtype=np.float32)[:, None] - np.float32(start[0])
    x = np.arange(block.x0, block.x1, dtype=np.float32)[None, :] - np.float32(start[1])
    dy, dx = (end - start).astype(np.float32)
    # The nearest point of the segment; a segment of no length is a point.
    t = np.clip((y * dy + x * dx) / max(float(dy * dy + dx * dx), 1e-6), 0, 1)
    result: Field = np.hypot(y - t * dy, x - t * dx)
    return result


def _strokes(rng: np.random.Generator, size_px: int) -> list[Field]:
    """Return one or two hand-drawn lines along an edge of the slide, (n, 2) of y, x in pixels."""
    strokes = []
    for _ in range(int(rng.integers(1, 3))):
        t = np.linspace(0, 1, 12)
        away, start, length = rng.uniform(0.04, 0.16), rng.uniform(0.1, 0.4), rng.uniform(0.3, 0.5)
        wave = 0.02 * np.sin(t * rng.uniform(4, 9) + rng.uniform(0, 6)) + 0.006 * rng.standard_normal(12)
        # Along the upper edge, as fractions of the slide; then it may move to the lower one, or the left or right one.
        points = np.stack([away + wave, start + length * t], 1)
        points = points if rng.random() < 0.5 else 1 - points
        strokes.append((points if rng.random() < 0.5 else points[:, ::-1]) * size_px)
    return strokes
