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

HAEMATOXYLIN, EOSIN = (0.60, 0.72, 0.36), (0.14, 0.83, 0.50)
"""How much of its density each dye has in red, green and blue light, before a case varies it."""

NEST_H, NEST_E = 24 / 255, 82 / 255
"""The two planes of the cytoplasm that nests of plump cells share, as a share of the darkest."""

_RED_H, _GREEN_H = 255 * H_SCALE * HAEMATOXYLIN[0], 255 * H_SCALE * HAEMATOXYLIN[1]
_RED_E, _GREEN_E = 255 * E_SCALE * EOSIN[0], 255 * E_SCALE * EOSIN[1]

TEXTURE_PX = 1024
_SEED = 20_160_316
_MARGIN_PX = 2


@dataclass(frozen=True)
class Library:
    """Drawings by kind: ``stamps[kind][i]`` is a (s, s) uint8 square, s odd, of haematoxylin (of eosin: RED_CELL).

    ``eosin[kind][i]`` is the eosin that some kinds hold besides.
    """

    stamps: tuple[tuple[Array, ...], ...]
    eosin: dict[int, tuple[Array, ...]]
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
    stamps.append(tuple(plump[0] for plump, _ in pairs))
    stamps.append(tuple(owl[0] for _, owl in pairs))
    eosin = {PLUMP: tuple(plump[1] for plump, _ in pairs), OWL: tuple(owl[1] for _, owl in pairs)}
    stamps.append(tuple(_red_cell(rng, mpp_um) for _ in range(VARIANTS[RED_CELL])))
    reach = max(stamp.shape[0] for kind in stamps for stamp in kind) // 2 + 1
    return Library(tuple(stamps), eosin, reach)


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


def _pair(rng: np.random.Generator, mpp_um: float) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return a plump and an owl's-eye nucleus, (H, E) each, on one outline and with one mean colour.

    The plump one has coarse chromatin and a little eosin all over. The other is a red inclusion in a clear halo inside
    a dark rim: the same dyes, elsewhere.
    """
    width, aspect = rng.uniform(11.5, 13.5), rng.uniform(1.0, 1.2)
    inside = _outline(rng, mpp_um, width, aspect, rng.uniform(0, np.pi))
    cover = np.clip(inside / 0.9 + 0.5, 0, 1)
    clumps = _chromatin(rng, inside.shape, 0.9 / mpp_um)
    rim = np.exp(-np.square((inside - 0.9) / 0.9))
    inclusion = np.clip((inside - width * 0.25) / 1.1 + 0.5, 0, 1)
    owl_h = cover * np.clip(0.10 + 0.72 * rim + 0.08 * inclusion + 0.06 * clumps, 0.03, 1)
    owl_e = cover * np.clip(0.15 + 0.85 * inclusion + 0.04 * clumps, 0, 1)
    plump_h = cover * np.clip(0.5 + 0.12 * clumps, 0.15, 1)
    plump_e = cover * np.clip(0.5 + 0.05 * clumps, 0, 1)
    for _ in range(4):  # red light sees mostly haematoxylin, green light both
        plump_h = _same_light(plump_h, plump_e, owl_h, owl_e, channel=0)
        plump_e = _same_light(plump_e, plump_h, owl_e, owl_h, channel=1)
    return (_plane(plump_h), _plane(plump_e)), (_plane(owl_h), _plane(owl_e))


def _same_light(drawing: Array, other: Array, wanted: Array, wanted_other: Array, channel: int) -> Array:
    """Return ``drawing`` scaled so that with ``other`` it lets as much light through as the wanted pair of planes.

    ``channel`` is 0 for red light, where ``drawing`` is haematoxylin, and 1 for green, where it is eosin.
    """
    own, beside = ((_RED_H, _RED_E), (_GREEN_E, _GREEN_H))[channel]
    under, under_beside = ((NEST_H, NEST_E), (NEST_E, NEST_H))[channel]
    around = np.exp(-beside * np.maximum(other, under_beside))
    light = np.exp(-own * np.maximum(wanted, under) - beside * np.maximum(wanted_other, under_beside)).sum()
    low, high = 0.05, 4.0
    for _ in range(30):
        gain = (low + high) / 2
        dark = (around * np.exp(-own * np.clip(drawing * gain, under, 1))).sum() < light
        low, high = (low, gain) if dark else (gain, high)
    result: Array = np.clip(drawing * gain, 0, 1)
    return result


def _red_cell(rng: np.random.Generator, mpp_um: float) -> Array:
    inside = _outline(rng, mpp_um, rng.uniform(5.5, 7), rng.uniform(1, 1.3), rng.uniform(0, np.pi))
    dimple = 1 - 0.25 * np.clip((inside - 1.6) / 1.5, 0, 1)
    return _plane(np.clip(inside / 0.8 + 0.5, 0, 1) * rng.uniform(0.55, 0.68) * dimple)


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
