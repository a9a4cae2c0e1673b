"""The two stains of a slide, estimated from its tissue (Macenko et al., ISBI 2009)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from data.arrays import Mask
from pathology.arrays import Float, Planes

MIN_DENSITY = 0.15
"""Only pixels whose optical density (natural logarithm) is above this in all channels are used."""
_PERCENTILE = 1.0
_STRENGTH_PERCENTILE = 99.0
_MIN_PX = 1000
_MAX_PX = 1_000_000
_MIN_ANGLE = 0.02


@dataclass(frozen=True, slots=True)
class StainVectors:
    """Haematoxylin and eosin of one slide.

    Attributes:
        haematoxylin, eosin: Unit vectors of optical density in (red, green, blue).
        strength: 99th percentile of the concentration of each stain.
    """

    haematoxylin: tuple[float, float, float]
    eosin: tuple[float, float, float]
    strength: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of the fields, rounded to four digits."""
        vectors = {"haematoxylin": self.haematoxylin, "eosin": self.eosin, "strength": self.strength}
        return {name: [round(v, 4) for v in values] for name, values in vectors.items()}


def estimate_stains(pixels: npt.NDArray[np.uint8], glass: Float) -> StainVectors | None:
    """Estimate the stain vectors of tissue with Macenko's method.

    Both stain vectors lie in the plane of the two largest eigenvectors of the optical densities' covariance. They are
    the extreme directions in it: the 1st and 99th percentile of the angle. The one that absorbs more red is
    haematoxylin.

    Args:
        pixels: ``(n, 3)`` uint8, pixels of tissue.
        glass: ``(3,)`` colour of glass.

    Returns:
        The stains; None if fewer than a thousand pixels are stained, or if all have nearly the same colour.
    """
    # Channels first: contiguous memory is faster.
    density = np.log((glass[:, None] + 1) / (pixels.T.astype(np.float32) + 1))
    density = density.take(np.flatnonzero(density.min(0) > MIN_DENSITY), axis=1)
    if density.shape[1] < _MIN_PX:
        return None
    # float64, because eigenvectors of two similar stains are badly conditioned; it costs nothing for 3 × 3 numbers.
    _, vectors = np.linalg.eigh(np.cov(density, dtype=np.float64))
    # `eigh` sorts eigenvalues in ascending order: the two largest are the last.
    plane = vectors[:, [2, 1]]
    # The sign of eigenvectors is arbitrary. Pointed towards absorption, they keep angles away from the jump at ±180°.
    plane = plane * np.where(plane.sum(0) < 0, -1, 1)
    projected = plane.T.astype(np.float32) @ density
    angle = np.arctan2(projected[1], projected[0])
    low, high = np.percentile(angle, [_PERCENTILE, 100 - _PERCENTILE])
    if high - low < _MIN_ANGLE:
        return None
    in_plane = [plane @ [np.cos(a), np.sin(a)] for a in (low, high)]
    stains = np.stack([_direction(v) for v in in_plane])
    if stains[0, 0] < stains[1, 0]:
        stains = stains[::-1]
    concentrations = np.linalg.pinv(stains.T).astype(np.float32) @ density
    h, e = (tuple(float(v) for v in vector) for vector in stains)
    strong = np.percentile(concentrations, _STRENGTH_PERCENTILE, axis=1)
    return StainVectors(h, e, (float(strong[0]), float(strong[1])))  # type: ignore[arg-type]


def _direction(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a stain's unit vector: ``vector`` with the sign that makes its sum positive, negative parts set to 0."""
    absorbing = np.maximum(vector if vector.sum() >= 0 else -vector, 0)
    result: npt.NDArray[np.float64] = absorbing / np.linalg.norm(absorbing)
    return result


@dataclass(slots=True)
class StainSample:
    """Pixels of a slide for `estimate_stains`, sampled on a regular grid while it is ingested; about 3 MB at most.

    Attributes:
        height_px, width_px: Size of the level that is sampled.
    """

    height_px: int
    width_px: int
    _step: int = field(init=False)
    _pixels: Planes = field(init=False)

    def __post_init__(self) -> None:
        self._step = max(1, int(np.ceil(np.sqrt(self.height_px * self.width_px / _MAX_PX))))
        shape = (-(-self.height_px // self._step), -(-self.width_px // self._step))
        self._pixels = np.full((3, *shape), 255, np.uint8)

    def add(self, y0: int, x0: int, block: Planes) -> None:
        """Sample pixels of ``block`` ``(3, h, w)``, which starts at ``(y0, x0)``."""
        step = self._step
        # From the first row of the block that is on the grid of the whole level.
        sampled = block[:, -y0 % step :: step, -x0 % step :: step]
        y, x = -(-y0 // step), -(-x0 // step)
        self._pixels[:, y : y + sampled.shape[1], x : x + sampled.shape[2]] = sampled

    def estimate(self, tissue: Mask, glass: Float) -> StainVectors | None:
        """Estimate the stains from the samples within ``tissue``, a mask of the whole slide at any resolution."""
        rows = np.arange(self._pixels.shape[1]) * self._step * tissue.shape[0] // self.height_px
        columns = np.arange(self._pixels.shape[2]) * self._step * tissue.shape[1] // self.width_px
        inside = tissue[rows][:, columns]
        return estimate_stains(self._pixels.reshape(3, -1).take(np.flatnonzero(inside), axis=1).T, glass)
