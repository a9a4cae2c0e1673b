"""Sprites (small images of nuclei and red cells that are stamped many times) and background textures.

They are made once per process from a fixed seed, so slides differ only in which sprites are where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from scipy import ndimage

from pathology.synthetic.fields import Field

SPINDLE, OVAL, LYMPHOCYTE, DUSTY, COARSE, RED_CELL = range(6)
"""Kinds of sprites. COARSE nuclei make a slide positive; DUSTY nuclei are their negative counterpart: the same large
nuclei with the same mean colour, but with fine instead of clumped chromatin."""

VARIANTS = (6, 6, 24, 48, 48, 12)
"""Number of sprites of each kind; for elongated kinds, in each direction."""

ANGLES = 16
"""Number of directions, over half a turn, of SPINDLE and OVAL nuclei."""

H_SCALE, E_SCALE = 2.4 / 255, 1.6 / 255
"""Optical density of one unit of the haematoxylin and the eosin plane."""

HAEMATOXYLIN, EOSIN = (0.60, 0.72, 0.36), (0.14, 0.83, 0.50)
"""Relative optical density of each stain in red, green and blue light, before the variation of the case."""

NEST_H, NEST_E = 24 / 255, 82 / 255
"""Values of the two planes in the cytoplasm of nests, as fractions of 255."""

PIGMENT = (2.1, 2.8, 1.25)
"""Optical density of a clump of chromatin in red, green and blue light."""

NUCLEOPLASM_E = 10
"""Value of the eosin plane inside a large nucleus."""

DUST_ONE, DUST_MOST = 40, 70
"""Values of the pigment plane: fine chromatin of density one, and its maximum; larger values are coarse granules."""

_RED_GREEN_BLUE_H = np.array([H_SCALE * share for share in HAEMATOXYLIN], np.float32)

TEXTURE_PX = 1024
_SEED = 20_160_316
_MARGIN_PX = 2


@dataclass(frozen=True)
class Library:
    """All sprites for one resolution, (s, s) uint8 with odd s.

    Attributes:
        stamps: ``stamps[kind][i]``: values of the haematoxylin plane; for RED_CELL of the eosin plane.
        pigment: ``pigment[kind][i]``: values of the pigment plane (chromatin) of DUSTY and COARSE nuclei.
        cover: ``cover[i]``: opacity of a DUSTY or COARSE nucleus, 0 to 255.
        dust: Optical density of fine chromatin of value ``DUST_ONE`` in red, green and blue light.
        reach_px: Half the side of the largest sprite, plus one.
    """

    stamps: tuple[tuple[Field, ...], ...]
    pigment: dict[int, tuple[Field, ...]]
    cover: tuple[Field, ...]
    dust: Field
    reach_px: int


@dataclass(frozen=True)
class _Pair:
    """One large nucleus: its haematoxylin plane, its opacity, and its chromatin (0…1), once fine and once clumped."""

    nucleus: Field
    cover: Field
    dust: Field
    granules: Field


@lru_cache(maxsize=4)
def library(mpp_um: float) -> Library:
    """Return the sprites for slides with these microns per pixel at level 0."""
    rng = np.random.default_rng(_SEED)
    # At the index of their kind: SPINDLE, OVAL, LYMPHOCYTE, then DUSTY, COARSE and RED_CELL.
    stamps = [
        _elongated(rng, mpp_um, length_um=(10, 17), width_um=(2.3, 3.4), density=(0.5, 0.72), count=VARIANTS[SPINDLE]),
        _elongated(rng, mpp_um, length_um=(9.0, 11.5), width_um=(5.4, 7.2), density=(0.5, 0.78), count=VARIANTS[OVAL]),
        tuple(
            _nucleus(rng, mpp_um, rng.uniform(5.6, 7), 1.1, 0, 0.74, grain=0.10) for _ in range(VARIANTS[LYMPHOCYTE])
        ),
    ]
    pairs = [_pair(rng, mpp_um) for _ in range(VARIANTS[DUSTY])]
    dust, fine, coarse = _match_colours(pairs)
    # DUSTY and COARSE nuclei, of slides of either label, have the same outlines and mean colour: only the texture of
    # their chromatin tells them apart.
    stamps += [tuple(pair.nucleus for pair in pairs)] * 2
    pigment = {DUSTY: tuple(fine), COARSE: tuple(coarse)}
    stamps.append(tuple(_red_cell(rng, mpp_um) for _ in range(VARIANTS[RED_CELL])))
    reach_px = max(stamp.shape[0] for kind in stamps for stamp in kind) // 2 + 1
    return Library(tuple(stamps), pigment, cover=tuple(pair.cover for pair in pairs), dust=dust, reach_px=reach_px)


def _elongated(
    rng: np.random.Generator,
    mpp_um: float,
    length_um: tuple[float, float],
    width_um: tuple[float, float],
    density: tuple[float, float],
    count: int,
) -> tuple[Field, ...]:
    """Return ``ANGLES * count`` elongated nuclei, at index ``angle * count + variant``.

    Their length, width and density are drawn between the two values of each argument.
    """
    shapes = [(rng.uniform(*length_um), rng.uniform(*width_um), rng.uniform(*density)) for _ in range(count)]
    return tuple(
        _nucleus(rng, mpp_um, width, length / width, np.pi * angle / ANGLES, dark, grain=0.16)
        for angle in range(ANGLES)
        for length, width, dark in shapes
    )


def _outline(rng: np.random.Generator, mpp_um: float, width_um: float, aspect: float, angle: float) -> Field:
    """Return the distance from a nucleus' outline in µm, positive inside, on a square that contains it."""
    half = int(np.ceil(width_um * aspect * 0.62 / mpp_um)) + _MARGIN_PX
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32) * np.float32(mpp_um)
    along, across = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
    # A radius that varies with the angle: lobes of 2, 3 and 4 periods.
    turn = np.arctan2(across, along)
    lobes = sum(rng.normal(0, 0.045) * np.cos(n * turn + rng.uniform(0, 6.28)) for n in (2, 3, 4))
    radius = np.hypot(along / aspect, across) * (1 + lobes)
    result: Field = (width_um / 2 - radius).astype(np.float32)
    return result


def _chromatin(rng: np.random.Generator, shape: tuple[int, ...], grain_px: float) -> Field:
    """Return smoothed noise with standard deviation 1."""
    noise = ndimage.gaussian_filter(rng.standard_normal(shape), grain_px)
    result: Field = (noise / noise.std()).astype(np.float32)
    return result


def _nucleus(
    rng: np.random.Generator, mpp_um: float, width_um: float, aspect: float, angle: float, dark: float, grain: float
) -> Field:
    """Return the haematoxylin plane of a nucleus; ``dark``: its density, 0 to 1, ``grain``: how much that varies."""
    inside = _outline(rng, mpp_um, width_um, aspect, angle)
    cover = np.clip(inside / 0.9 + 0.5, 0, 1)
    rim = np.exp(-np.square((inside - 0.5) / 0.6))
    body = dark * (0.85 + 0.25 * rim + grain * _chromatin(rng, inside.shape, 0.55 / mpp_um))
    return _plane(cover * body)


def _pair(rng: np.random.Generator, mpp_um: float) -> _Pair:
    """Return a large nucleus with its chromatin, once fine and once in coarse clumps."""
    width, aspect = rng.uniform(11.5, 13.5), rng.uniform(1.0, 1.2)
    inside = _outline(rng, mpp_um, width, aspect, rng.uniform(0, np.pi))
    cover = np.clip(inside / 0.9 + 0.5, 0, 1)
    rim = np.exp(-np.square((inside - 0.4) / 0.5))
    haematoxylin = _plane(cover * np.clip(0.07 + 0.45 * rim, 0, 1))
    dust = cover * np.clip(1 + 0.2 * _chromatin(rng, inside.shape, 0.7 / mpp_um), 0.4, 1.7)
    return _Pair(haematoxylin, _plane(cover), dust.astype(np.float32), _granules(rng, mpp_um, inside))


def _granules(rng: np.random.Generator, mpp_um: float, depth_um: Field) -> Field:
    """Return the opacity, 0 to 1, of the coarse clumps of chromatin in a nucleus: discs on a jittered lattice.

    Args:
        rng: Draws the lattice and the discs.
        mpp_um: Microns per pixel.
        depth_um: Distance from the nucleus' outline, positive inside; granules fade towards it.
    """
    half = depth_um.shape[0] // 2
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32) * np.float32(mpp_um)
    angle = rng.uniform(0, np.pi)
    spacing_um, radius_um = rng.uniform(3.5, 4.6), rng.uniform(1.1, 1.4)
    result = np.zeros_like(depth_um)
    ragged_um = 0.16 * _chromatin(rng, depth_um.shape, 0.5 / mpp_um)
    for i in range(-2, 3):
        for j in range(-2, 3):
            # 0.87 ≈ √3 / 2, and every second row is shifted by half: a triangular lattice.
            v, u = np.array([i * 0.87 * spacing_um, (j + i % 2 / 2) * spacing_um]) + rng.normal(0, 0.55, 2)
            centre_y, centre_x = v * np.cos(angle) - u * np.sin(angle), v * np.sin(angle) + u * np.cos(angle)
            distance_um = np.hypot(y - centre_y, (x - centre_x) * rng.uniform(0.75, 1.3))
            inside_um = radius_um * rng.uniform(0.75, 1.15) - distance_um + ragged_um
            # The edge of a disc is 0.9 µm wide.
            result = np.maximum(result, np.clip(inside_um / 0.9 + 0.5, 0, 1) * rng.uniform(0.9, 1))
    return (result * np.clip((depth_um - 0.3) / 0.8, 0, 1)).astype(np.float32)


def _match_colours(pairs: list[_Pair]) -> tuple[Field, list[Field], list[Field]]:
    """Choose the density of fine chromatin so that nuclei have the same mean colour with fine as with coarse chromatin.

    The density per colour channel makes the mean over all nuclei equal in red, green and blue. A gain for each nucleus
    then makes its own mean equal in green.

    Returns:
        The density of fine chromatin in red, green and blue; the nuclei's pigment planes with fine chromatin; and
        those with coarse chromatin.
    """
    coarse = [_coarse_codes(pair.granules) for pair in pairs]
    # Any density will do: the light through coarse chromatin does not depend on the density of fine chromatin.
    light_of_code = pigment_light(np.ones(3, np.float32))
    nucleoplasm_density = np.array([NUCLEOPLASM_E * E_SCALE * share for share in EOSIN], np.float32)
    # Of each nucleus: the light through all of it but its chromatin, and the sum of that through coarse chromatin, too.
    light = [
        np.exp(-nucleoplasm_density - _RED_GREEN_BLUE_H * pair.nucleus[..., None].astype(np.float32)) for pair in pairs
    ]
    target_light = [(base * light_of_code[codes]).sum((0, 1)) for base, codes in zip(light, coarse, strict=True)]
    density = np.zeros(3)
    for channel in range(3):
        light_of_channel = [light_of_nucleus[..., channel] for light_of_nucleus in light]
        density[channel] = _solve(
            partial(_light_through, light_of_channel, [pair.dust for pair in pairs], 1.0),
            sum(total[channel] for total in target_light),
        )
    dust = []
    for base, pair, total in zip(light, pairs, target_light, strict=True):
        # Channel 1 is green.
        gain = _solve(partial(_light_through, [base[..., 1]], [pair.dust], density[1]), total[1])
        dust.append(np.clip(gain * pair.dust * DUST_ONE + 0.5, 0, DUST_MOST).astype(np.uint8))
    return density.astype(np.float32), dust, coarse


def _coarse_codes(granules: Field) -> Field:
    """Return the pigment plane of coarse granules."""
    codes = np.where(granules > 0.04, DUST_MOST + granules * (255 - DUST_MOST), 0)
    return np.clip(codes + 0.5, 0, 255).astype(np.uint8)


def _light_through(light: Sequence[Field], dust: Sequence[Field], scale: float, density: float) -> float:
    """Return the sum of the light transmitted by fine chromatin of ``density · scale``."""
    return sum(float((b * np.exp(-density * scale * d)).sum()) for b, d in zip(light, dust, strict=True))


def _solve(light: Callable[[float], float], target: float) -> float:
    """Return the density at which ``light`` (a decreasing function of it) is ``target``, by bisection."""
    low, high = 0.0, 8.0
    # 8 / 2⁴⁰ is below the precision of a float32.
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if light(middle) > target else (low, middle)
    return (low + high) / 2


def pigment_light(dust: Field) -> Field:
    """Return the transmitted fraction of red, green and blue light for values of the pigment plane, (256, 3) float32.

    Args:
        dust: See `Library`.
    """
    codes = np.arange(256, dtype=np.float32)[:, None]
    fine = codes / DUST_ONE * dust
    coarse = (codes - DUST_MOST) / (255 - DUST_MOST) * np.array(PIGMENT, np.float32)
    return np.exp(-np.where(codes <= DUST_MOST, fine, coarse)).astype(np.float32)


def _red_cell(rng: np.random.Generator, mpp_um: float) -> Field:
    """Return the eosin plane of a red cell, which is paler in the middle."""
    inside = _outline(rng, mpp_um, rng.uniform(5.5, 7), rng.uniform(1, 1.3), rng.uniform(0, np.pi))
    dimple = 1 - 0.25 * np.clip((inside - 1.6) / 1.5, 0, 1)
    return _plane(np.clip(inside / 0.8 + 0.5, 0, 1) * rng.uniform(0.55, 0.68) * dimple)


def _plane(values: Field) -> Field:
    """Return values 0…1 as uint8."""
    return np.clip(values * 255 + 0.5, 0, 255).astype(np.uint8)


@lru_cache(maxsize=1)
def fibres() -> Field:
    """Return the fibre texture, (1024, 1024) float32 of 0…1, periodic: rows across the fibres, columns along them."""
    rng = np.random.default_rng(_SEED + 1)
    fine = _periodic(rng, 1.2, 12)
    bundle = _periodic(rng, 5.0, 36)
    gaps = _periodic(rng, 2.6, 15)
    mixed = 0.55 + 0.12 * fine + 0.16 * bundle - 0.5 * np.clip(gaps - 0.7, 0, 1.1)
    return np.clip(mixed, 0, 1).astype(np.float32)


@lru_cache(maxsize=1)
def grains() -> Field:
    """Return an isotropic fine texture, (1024, 1024) float32, mean 0, deviation 1, periodic."""
    rng = np.random.default_rng(_SEED + 2)
    return (0.6 * _periodic(rng, 1.0, 1.0) + 0.8 * _periodic(rng, 2.6, 2.6)).astype(np.float32)


def _periodic(rng: np.random.Generator, across_px: float, along_px: float) -> Field:
    """Return Gaussian noise smoothed differently along the two axes, deviation 1."""
    noise = rng.standard_normal((TEXTURE_PX, TEXTURE_PX), dtype=np.float32)
    smooth = ndimage.gaussian_filter(noise, (across_px, along_px), mode="wrap")
    result: Field = smooth / smooth.std()
    return result
