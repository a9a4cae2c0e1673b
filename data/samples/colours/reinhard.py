"""Stain normalisation of Reinhard et al., "Color transfer between images", IEEE Comput Graph Appl 21:34 (2001).

In the space lαβ, the logarithms of cone responses on three axes that are independent in natural images, mean and
standard deviation of each axis become those of the reference. Glass must stay white: pixels that absorb less than
stained tissue are blended with white, the more the less they absorb.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.arrays import Pixels
from data.samples.colours.density_mix import STRIP_PX
from data.samples.colours.slide_colours import STAINED_DENSITY

REFERENCE = {"mean": (8.63234435, -0.11501964, 0.03868433), "std": (0.57506023, 0.10403329, 0.01364062)}
"""Mean and standard deviation of (l, α, β), natural logarithms of values to 255; the default of HistomicsTK."""

_TO_LMS = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
_TO_AXES = np.diag([3**-0.5, 6**-0.5, 2**-0.5]) @ np.array([[1.0, 1.0, 1.0], [1.0, 1.0, -2.0], [1.0, -1.0, 0.0]])
_FEWEST_PX = 1000

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class LabStatistics:
    """Mean and standard deviation of (l, α, β) of the tissue of a slide."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, windows: Iterable[Pixels], glass: NDArray[np.float32]) -> LabStatistics | None:
        """Return the statistics of the stained pixels of windows ``(3, n)``.

        None for fewer than 1000 stained pixels, or if these do not differ in one of the axes.
        """
        stained = [window[:, _densities(window, glass) >= STAINED_DENSITY] for window in windows]
        pixels = np.concatenate(stained, axis=1) if stained else np.empty((3, 0), np.uint8)
        if pixels.shape[1] < _FEWEST_PX:
            return None
        lab = _TO_AXES @ np.log(_TO_LMS @ (pixels + 1.0))
        std = lab.std(axis=1)
        # The map divides by these deviations.
        return cls(tuple(lab.mean(axis=1).tolist()), tuple(std.tolist())) if std.min() > 1e-6 else None


@dataclass(frozen=True, eq=False)
class ReinhardMap:
    """The change of one slide's colours.

    Attributes:
        identity: Text of the method and its reference.
        glass: ``(3,)``, the colour of the slide's glass; it becomes white.
        factors, summands: ``(3, 3)`` and ``(3,)``: new log LMS are factors @ log LMS + summands.
    """

    identity: str
    glass: NDArray[np.float32]
    factors: Matrix
    summands: Matrix

    @classmethod
    def of(
        cls,
        statistics: LabStatistics,
        glass: NDArray[np.float32],
        reference: Mapping[str, Sequence[float]],
        identity: str = "",
    ) -> ReinhardMap:
        """Return the map from a slide's statistics to those of the reference.

        Args:
            statistics: Mean and standard deviation of the slide's tissue, on the axes (l, α, β).
            glass: ``(3,)``, the colour of the slide's glass.
            reference: ``mean`` and ``std`` of the reference.
            identity: Text of the method and its reference.
        """
        scale = np.asarray(reference["std"]) / np.asarray(statistics.std)
        shift = np.asarray(reference["mean"]) - scale * np.asarray(statistics.mean)
        back = np.linalg.inv(_TO_AXES)
        # One matrix instead of three products: from log LMS to the axes, scaled, and back.
        factors, summands = back @ np.diag(scale) @ _TO_AXES, back @ shift
        return cls(identity, glass, factors.astype(np.float32), summands.astype(np.float32))

    def __call__(self, pixels: Pixels) -> Pixels:
        """Return pixels (3, …) uint8 in the reference's colours, a new array; glass and brighter pixels become 255.

        It uses only elementwise products and sums in a fixed order: a pixel's result does not depend on its position.
        """
        result = np.empty(pixels.shape, np.uint8)
        flat, out = pixels.reshape(3, -1), result.reshape(3, -1)
        for start in range(0, flat.shape[1], STRIP_PX):
            # In strips: floats of a whole image would take many times the memory of its pixels.
            strip = slice(start, start + STRIP_PX)
            values = np.ascontiguousarray(flat[:, strip])
            # The new mean and deviation are set in logarithms of cone responses (LMS). Values plus one, because 0
            # (black) has no logarithm.
            log_lms = np.log(_product(_TO_LMS.astype(np.float32), values + np.float32(1)))
            lms = np.exp(_product(self.factors, log_lms) + self.summands[:, None])
            rgb = np.clip(_product(np.linalg.inv(_TO_LMS).astype(np.float32), lms) - np.float32(1), 0, 255)
            # Blended with white where a pixel absorbs less than stained tissue: the map would colour the glass.
            share = np.minimum(_densities(values, self.glass) * np.float32(1 / STAINED_DENSITY), np.float32(1))
            out[:, strip] = np.rint(255 - share * (255 - rgb)).astype(np.uint8)
        return result


def _product(matrix: Matrix, values: Matrix) -> Matrix:
    """Return ``matrix @ values`` ``(3, n)``, by elementwise products and sums."""
    result = np.empty_like(values)
    for row, target in zip(matrix, result, strict=True):
        np.multiply(values[0], row[0], out=target)
        target += values[1] * row[1]
        target += values[2] * row[2]
    return result


def _densities(pixels: Pixels, glass: NDArray[np.float32]) -> Matrix:
    """Return ``(n,)``: the mean density of each pixel's channels relative to glass; 0 for a brighter channel."""
    total = np.zeros(pixels.shape[1], np.float32)
    for channel, light in zip(pixels, glass, strict=True):
        table = np.maximum(np.log((light + 1) / (np.arange(256, dtype=np.float32) + 1)), 0) / np.float32(3)
        total += np.take(table.astype(np.float32), channel)
    return total
