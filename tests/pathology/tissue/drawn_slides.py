"""Slides drawn cell by cell at 1 µm per pixel: H&E and immunostains, with lymphoid follicles, fat and pen marks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import ndimage

HAEMATOXYLIN = np.array([0.65, 0.70, 0.29])
BLUE_HAEMATOXYLIN = np.array([0.82, 0.56, 0.22])  # as many scanners show the counterstain of an immunostain
EOSIN = np.array([0.10, 0.85, 0.45])
DAB = np.array([0.27, 0.57, 0.78])
GLASS = np.array([243.0, 242.0, 244.0])
PENS = {
    "blue": (40, 60, 170),
    "light blue": (70, 120, 210),
    "green": (20, 130, 60),
    "black": (25, 25, 28),
    "red": (205, 30, 45),
}


@dataclass(frozen=True)
class Drawn:
    """A slide ``(3, h, w)`` uint8 at 1 µm per pixel, and where tissue (fat included), follicles, fat and ink are."""

    image: np.ndarray
    tissue: np.ndarray
    follicles: np.ndarray
    fat: np.ndarray
    ink: np.ndarray


def draw(stain: str, side_px: int = 1280, pen: str | None = None, seed: int = 0) -> Drawn:
    """Draw a slide.

    Args:
        stain: ``he``, ``ihc`` (brown nests on a blue counterstain) or ``negative`` (the counterstain alone).
        side_px: Height and width, µm.
        pen: One of `PENS`: a stroke over glass and a corner of the tissue.
        seed: Of all that is random.
    """
    image, tissue, follicles, fat, rng = _without_pen(stain, side_px, seed)
    if not pen:
        return Drawn(image.clip(0, 255).astype(np.uint8), tissue, follicles, fat, np.zeros_like(tissue))
    y, x = _places(side_px)
    half = 45 / side_px
    ink = (np.abs(y - 0.10 - 0.03 * np.sin(9 * x)) < half) & (x > 0.1) & (x < 0.9)
    ink |= (np.abs(x - 0.14 - 0.02 * np.sin(7 * y)) < half) & (y > 0.2) & (y < 0.8)
    noise = copy.deepcopy(rng).standard_normal((side_px, side_px))
    streaks = 1 + 0.1 * ndimage.gaussian_filter(noise, (2, 30)) * 8
    through = np.array(PENS[pen])[:, None] / 245
    image = image.copy()
    image[:, ink] *= through ** streaks[ink].clip(0.6, 1.5)
    return Drawn(image.clip(0, 255).astype(np.uint8), tissue, follicles, fat, ink)


def _places(side_px: int) -> tuple[np.ndarray, np.ndarray]:
    y, x = np.mgrid[:side_px, :side_px].astype(np.float32) / side_px
    return y, x


@lru_cache(maxsize=2)
def _without_pen(
    stain: str, side_px: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.random.Generator]:
    """Return the image as floats, tissue, follicles, fat, and the generator as it is then: slides share them."""
    rng = np.random.default_rng(seed)
    y, x = _places(side_px)
    wave = ndimage.zoom(rng.normal(0, 0.02, (9, 9)), side_px / 9, order=3).astype(np.float32)
    tissue = np.hypot((y - 0.52) / 0.40, (x - 0.48) / 0.36) + wave < 1
    fat = tissue & (np.hypot(y - 0.80, x - 0.48) < 0.15)
    follicles, nests = np.zeros_like(tissue), np.zeros_like(tissue)
    for cy, cx in ((0.3, 0.35), (0.42, 0.62), (0.55, 0.3), (0.62, 0.55), (0.36, 0.48)):
        follicles |= np.hypot(y - cy, x - cx) < 0.06
    for cy, cx in rng.uniform(0.2, 0.75, (14, 2)):
        nests |= np.hypot(y - cy, x - cx) < 0.035
    follicles &= tissue & ~fat
    nests &= tissue & ~fat & ~follicles
    nuclei = _nuclei(rng, np.where(follicles, 0.018, np.where(nests, 0.004, 0.0015)) * (tissue & ~fat))
    walls = _walls(rng, side_px) & fat
    grain = ndimage.gaussian_filter(rng.standard_normal((side_px, side_px)).astype(np.float32), 2) * 3
    ground = np.clip(1 + 0.25 * grain, 0.2, 2) * (tissue & ~fat)
    if stain == "he":
        light = nuclei[None] * 1.1 * HAEMATOXYLIN[:, None, None]
        light = light + (ground * 0.35 + nests * 0.25 + walls * 0.5) * EOSIN[:, None, None]
    else:
        light = (nuclei * 0.85 + ground * 0.10 + walls * 0.25)[None] * BLUE_HAEMATOXYLIN[:, None, None]
        if stain == "ihc":
            light = light + (nests * (0.9 + 0.3 * grain)).clip(0) * DAB[:, None, None]
    image = GLASS[:, None, None] * np.exp(-light.astype(np.float32)) + rng.normal(0, 1.5, (3, side_px, side_px))
    return image, tissue, follicles, fat, rng


def _nuclei(rng: np.random.Generator, per_um2: np.ndarray) -> np.ndarray:
    """Return the coverage by nuclei of 6 to 8 µm at this density."""
    spots = rng.random(per_um2.shape) < per_um2
    y, x = np.mgrid[-4:5, -4:5]
    disc = np.clip(3.8 - np.hypot(y, x), 0, 1)
    weight = np.where(spots, rng.uniform(0.7, 1.2, per_um2.shape), 0).astype(np.float32)
    return np.minimum(ndimage.convolve(weight, disc.astype(np.float32)), 1.3)


def _walls(rng: np.random.Generator, side_px: int) -> np.ndarray:
    """Return a web of thin walls around cells of about 70 µm."""
    step = 70
    rows, columns = np.mgrid[0:side_px:step, 0:side_px:step]
    seeds = np.ones((side_px, side_px), bool)
    jitter = rng.integers(-20, 21, (2, *rows.shape))
    seeds[np.clip(rows + jitter[0], 0, side_px - 1), np.clip(columns + jitter[1], 0, side_px - 1)] = False
    nearest = ndimage.distance_transform_edt(seeds, return_distances=False, return_indices=True)
    cell = nearest[0] * side_px + nearest[1]
    edge = (cell != np.roll(cell, 3, 0)) | (cell != np.roll(cell, 3, 1))
    return edge
