"""Change of colours by a 3 × 3 matrix of optical densities, between two lookup tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data.arrays import Pixels

# A step of 8 / 8192 is a quarter of a pixel value at white, where a density changes the value most.
STEPS = 8192
"""Steps of the density in the table of values."""
# Black has a density of ln 256 = 5.5; mixed densities above 8 are black, too.
MAX_DENSITY = 8.0
STRIP_PX = 32_768
"""Pixels computed at a time, so that their floats stay in the processor's cache."""


def density_table(glass: float = 255.0) -> NDArray[np.float32]:
    """Return ``(256,)``: the density of each pixel value, in steps of `value_table`; 0 if it is brighter than glass."""
    # Plus one, because 0 (black) has no logarithm.
    density: NDArray[np.float64] = np.maximum(-np.log((np.arange(256) + 1.0) / (glass + 1.0)), 0.0)
    return (density * (STEPS / MAX_DENSITY)).astype(np.float32)


def value_table(contrast: float = 1.0) -> NDArray[np.uint8]:
    """Return ``(STEPS,)`` uint8: the pixel value of each density step; ``contrast`` scales its distance to white."""
    density = (np.arange(STEPS) + 0.5) * (MAX_DENSITY / STEPS)
    values = 256.0 * np.exp(-density) - 1.0
    table: NDArray[np.float64] = np.clip(np.rint(255.0 - (255.0 - values) * contrast), 0, 255)
    return table.astype(np.uint8)


def mixed_densities(
    pixels: Pixels, to_density: NDArray[np.float32], mix: NDArray[np.float32], to_value: NDArray[np.uint8]
) -> Pixels:
    """Multiply the optical densities of pixels by a matrix; return the new pixels, (3, …) uint8.

    It uses only elementwise float32 products and sums in a fixed order: unlike with a matrix product, a pixel's result
    does not depend on its position in the array.

    Args:
        pixels: (3, …) uint8.
        to_density: (256,) density of each pixel value, in steps (see `density_table`); or (3, 256), for each channel.
        mix: (3, 3): the new densities of (red, green, blue) are densities @ mix.
        to_value: (STEPS,) pixel value of each density step, from `value_table`.
    """
    result = np.empty(pixels.shape, np.uint8)
    flat, out = pixels.reshape(3, -1), result.reshape(3, -1)
    tables = np.broadcast_to(to_density, (3, 256))
    density = np.empty((3, STRIP_PX), np.float32)
    for start in range(0, flat.shape[1], STRIP_PX):
        strip = slice(start, min(start + STRIP_PX, flat.shape[1]))
        red, green, blue = density[:, : strip.stop - start]
        # Indices are always valid; "clip" only avoids the buffer that np.take fills first in its default mode.
        for table, channel, values in zip(tables, (red, green, blue), flat[:, strip], strict=True):
            np.take(table, values, out=channel, mode="clip")
        for k in range(3):
            mixed = red * mix[0, k]
            mixed += green * mix[1, k]
            mixed += blue * mix[2, k]
            np.clip(mixed, 0, STEPS - 1, out=mixed)
            # `astype` rounds down to the step, whose table entry is the value in its middle.
            np.take(to_value, mixed.astype(np.uint16), out=out[k, strip], mode="clip")
    return result
