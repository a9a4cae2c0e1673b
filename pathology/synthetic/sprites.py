"""Drawings that are stamped thousands of times: nuclei, red cells, and the textures between them.

All are made once a process from a seed of their own, so a slide differs from another only by what it places where.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import ndimage

from pathology.synthetic.fields import Array

SPINDLE, OVAL, LYMPHOCYTE, PLUMP, OWL, RED_CELL = range(6)
"""Kinds of drawings. PLUMP is the look-alike, OWL what makes a slide positive; both are drawn on the same outlines."""

VARIANTS = (6, 6, 24, 48, 48, 12)
"""Drawings of each kind (of the elongated kinds: in each direction)."""

ANGLES = 16
"""Directions of a half turn in which SPINDLE and OVAL nuclei are drawn."""

H_SCALE, E_SCALE = 2.4 / 255, 1.6 / 255
"""Optical density of one unit of the haematoxylin and the eosin plane."""

TEXTURE_PX = 1024
_SEED = 20_160_316
_MARGIN_PX = 2


@dataclass(frozen=True)
class Library:
    """Drawings by kind: ``stamps[kind][i]`` is a (s, s) uint8 square, s odd, of the stain plane it goes to."""

    stamps: tuple[tuple[Array, ...], ...]
    reach_px: int


@lru_cache(maxsize=4)
def library(mpp_um: float) -> Library:
    """Return the drawings for slides of this resolution (level 0)."""
    rng = np.random.default_rng(_SEED)
    stamps = [
        _turned(rng, mpp_um, length_um=(10, 17), width_um=(2.3, 3.4), density=(0.62, 0.95), count=VARIANTS[SPINDLE]),
        _turned(rng, mpp_um, length_um=(9.0, 11.5), width_um=(5.4, 7.2), density=(0.5, 0.78), count=VARIANTS[OVAL]),
        tuple(_nucleus(rng, mpp_um, rng.uniform(5.6, 7), 1.1, 0, 0.92, 0.10) for _ in range(VARIANTS[LYMPHOCYTE])),
    ]
    pairs = [_pair(rng, mpp_um) for _ in range(VARIANTS[PLUMP])]
    stamps.append(tuple(plump for plump, _ in pairs))
    stamps.append(tuple(owl for _, owl in pairs))
    stamps.append(tuple(_red_cell(rng, mpp_um) for _ in range(VARIANTS[RED_CELL])))
    reach = max(stamp.shape[0] for kind in stamps for stamp in kind) // 2 + 1
    return Library(tuple(stamps), reach)


def _turned(
    rng: np.random.Generator,
    mpp_um: float,
    length_um: tuple[float, float],
    width_um: tuple[float, float],
    density: tuple[float, float],
    count: int,
) -> tuple[Array, ...]:
    """Return ``ANGLES * count`` elongated nuclei; number ``angle * count + variant``."""
    shapes = [(rng.uniform(*length_um), rng.uniform(*width_um), rng.uniform(*density)) for _ in range(count)]
    return tuple(
        _nucleus(rng, mpp_um, width, length / width, np.pi * angle / ANGLES, dark, 0.16)
        for angle in range(ANGLES)
        for length, width, dark in shapes
    )


def _outline(rng: np.random.Generator, mpp_um: float, width_um: float, aspect: float, angle: float) -> Array:
    """Return the distance from the outline in µm, positive inside, on a square that holds the shape."""
    half = int(np.ceil(width_um * aspect * 0.62 / mpp_um)) + _MARGIN_PX
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32) * np.float32(mpp_um)
    along, across = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
    turn = np.arctan2(across, along)
    lobes = sum(rng.normal(0, 0.045) * np.cos(n * turn + rng.uniform(0, 6.28)) for n in (2, 3, 4))
    radius = np.hypot(along / aspect, across) * (1 + lobes)
    result: Array = (width_um / 2 - radius).astype(np.float32)
    return result


def _chromatin(rng: np.random.Generator, shape: tuple[int, ...], grain_px: float) -> Array:
    noise = ndimage.gaussian_filter(rng.standard_normal(shape), grain_px)
    result: Array = (noise / noise.std()).astype(np.float32)
    return result


def _nucleus(
    rng: np.random.Generator, mpp_um: float, width_um: float, aspect: float, angle: float, dark: float, grain: float
) -> Array:
    inside = _outline(rng, mpp_um, width_um, aspect, angle)
    cover = np.clip(inside / 0.9 + 0.5, 0, 1)
    rim = np.exp(-np.square((inside - 0.5) / 0.6))
    body = dark * (0.85 + 0.25 * rim + grain * _chromatin(rng, inside.shape, 0.55 / mpp_um))
    return _plane(cover * body)


def _pair(rng: np.random.Generator, mpp_um: float) -> tuple[Array, Array]:
    """Return a plump nucleus and an owl's-eye nucleus on one outline that let the same light through on average.

    The plump one has coarse chromatin all over. The other is a dark inclusion in a clear halo inside a dark rim.
    """
    width, aspect = rng.uniform(10.5, 12.5), rng.uniform(1.0, 1.2)
    inside = _outline(rng, mpp_um, width, aspect, rng.uniform(0, np.pi))
    cover = np.clip(inside / 0.9 + 0.5, 0, 1)
    clumps = _chromatin(rng, inside.shape, 0.9 / mpp_um)
    plump = cover * np.clip(0.56 + 0.12 * clumps, 0.2, 1) * rng.uniform(0.9, 1.08)
    rim = np.exp(-np.square((inside - 0.9) / 0.9))
    inclusion = np.clip((inside - width * 0.26) / 1.3 + 0.5, 0, 1)
    owl = cover * np.clip(0.16 + 0.6 * rim + 0.75 * inclusion + 0.09 * clumps, 0.05, 1)
    return _plane(plump), _plane(_same_light(owl, plump))


def _same_light(drawing: Array, reference: Array) -> Array:
    """Return ``drawing`` scaled so that it lets as much light through as ``reference``."""
    depth = 255 * H_SCALE * 0.7  # of the green channel, where most of the contrast is
    wanted = np.exp(-depth * reference).sum()
    low, high = 0.2, 3.0
    for _ in range(30):
        gain = (low + high) / 2
        low, high = (gain, high) if np.exp(-depth * np.clip(drawing * gain, 0, 1)).sum() > wanted else (low, gain)
    result: Array = np.clip(drawing * gain, 0, 1)
    return result


def _red_cell(rng: np.random.Generator, mpp_um: float) -> Array:
    inside = _outline(rng, mpp_um, rng.uniform(5.5, 7), rng.uniform(1, 1.3), rng.uniform(0, np.pi))
    dimple = 1 - 0.25 * np.clip((inside - 1.6) / 1.5, 0, 1)
    return _plane(np.clip(inside / 0.8 + 0.5, 0, 1) * rng.uniform(0.62, 0.8) * dimple)


def _plane(drawing: Array) -> Array:
    return np.clip(drawing * 255 + 0.5, 0, 255).astype(np.uint8)


@lru_cache(maxsize=1)
def fibres() -> Array:
    """Return the fibre texture, (1024, 1024) float32 of 0…1, periodic: rows across the fibres, columns along them."""
    rng = np.random.default_rng(_SEED + 1)
    fine = _periodic(rng, 1.2, 12)
    bundle = _periodic(rng, 5.0, 36)
    gaps = _periodic(rng, 2.6, 15)
    mixed = 0.55 + 0.12 * fine + 0.16 * bundle - 0.5 * np.clip(gaps - 0.7, 0, 1.1)
    return np.clip(mixed, 0, 1).astype(np.float32)


@lru_cache(maxsize=1)
def grains() -> Array:
    """Return an isotropic fine texture, (1024, 1024) float32, mean 0, deviation 1, periodic."""
    rng = np.random.default_rng(_SEED + 2)
    return (0.6 * _periodic(rng, 1.0, 1.0) + 0.8 * _periodic(rng, 2.6, 2.6)).astype(np.float32)


def _periodic(rng: np.random.Generator, across_px: float, along_px: float) -> Array:
    """Return Gaussian noise smoothed differently along the two axes, deviation 1."""
    noise = rng.standard_normal((TEXTURE_PX, TEXTURE_PX), dtype=np.float32)
    smooth = ndimage.gaussian_filter(noise, (across_px, along_px), mode="wrap")
    result: Array = smooth / smooth.std()
    return result
