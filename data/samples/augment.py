"""Varying a training image: mirrored, turned, stained and lit differently; the same for every box of it.

What happens to an image depends on (seed, epoch, slide) alone. The colours of a pixel depend on nothing but that pixel,
so any box can be read and varied alone, on any rank, and the boxes fit together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.samples.keyed import keyed_uniforms
from hyfi_core.plan.box import Box

HAEMATOXYLIN, EOSIN = (0.650, 0.704, 0.286), (0.072, 0.990, 0.105)
"""Optical density of (red, green, blue) of each stain: Ruifrok and Johnston, Anal Quant Cytol Histol 23:291 (2001)."""

_STEPS = 8192
_MOST_DENSITY = 8.0
_STRIP_PX = 32_768
_COPIED_COLUMNS = 32


@dataclass(frozen=True)
class Augment:
    """How much training images are varied; 0 and False turn a part off.

    Attributes:
        flips: flip, and rotate by multiples of 90° if the image is square, else of 180°.
        stain: spread of the amounts of haematoxylin and eosin: factors in 1 ± ``stain``.
        colour: spread of brightness and contrast: factors in 1 ± ``colour``.
    """

    flips: bool = True
    stain: float = 0.1
    colour: float = 0.05

    def draw(self, seed: int, epoch: int, slide_id: str, size_px: tuple[int, int]) -> Variation:
        """Return the variation of one image of ``size_px`` (height, width): a function of the arguments alone."""
        u = keyed_uniforms(6, "augment", seed, epoch, slide_id)
        turns = int(u[1] * 4) if size_px[0] == size_px[1] else 2 * int(u[1] * 2)
        factors = 1 + (2 * u[2:] - 1) * np.array([self.stain, self.stain, self.colour, self.colour])
        return Variation(
            size_px=size_px,
            mirror=self.flips and bool(u[0] < 0.5),
            turns=turns if self.flips else 0,
            stains=(float(factors[0]), float(factors[1])),
            density=float(factors[2]),
            contrast=float(factors[3]),
        )


@dataclass(frozen=True)
class Variation:
    """One mirror, turn and change of colours, for a whole image.

    The varied image is ``rot90(mirrored image, turns)`` (counter-clockwise, as NumPy turns), coloured.

    Attributes:
        size_px: (height, width), of the image before and after.
        mirror: left and right change places, before turning.
        turns: quarter turns; even where the image is not square.
        stains: factors of the amounts of haematoxylin and eosin.
        density: factor of the optical density: brightness, with white staying white.
        contrast: factor of the distance to white.
    """

    size_px: tuple[int, int]
    mirror: bool = False
    turns: int = 0
    stains: tuple[float, float] = (1.0, 1.0)
    density: float = 1.0
    contrast: float = 1.0

    def __post_init__(self) -> None:
        if self.turns % 2 and self.size_px[0] != self.size_px[1]:
            raise ValueError(f"a quarter turn needs a square image, given {self.size_px[0]} × {self.size_px[1]}")

    def source(self, box: Box) -> Box:
        """Return the box of the image that becomes ``box`` of the varied image."""
        height, width = self.size_px
        for _ in range(self.turns % 4):
            box = Box(box.x0, box.x1, height - box.y1, height - box.y0)
            height, width = width, height
        return Box(box.y0, box.y1, width - box.x1, width - box.x0) if self.mirror else box

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the varied pixels of a box, of those of its :meth:`source`; (3, h, w) uint8, a new array."""
        moved = np.rot90(pixels[:, :, ::-1] if self.mirror else pixels, self.turns, axes=(1, 2))
        return self.recolour(_contiguous(moved))

    def recolour(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the pixels in other colours; (3, h, w) uint8, a new array. White (255) stays exactly white.

        In optical density −log((v + 1) / 256) stains add up (Beer and Lambert), so other amounts of stain are a 3 × 3
        matrix. Logarithm and exponential are tables; between them only elementwise float32 products and sums in a fixed
        order, so that a pixel's result does not depend on where in an array it stands (a matrix product's would).
        """
        if self.stains == (1.0, 1.0) and self.density == 1.0 and self.contrast == 1.0:
            return pixels.copy()
        to_density, to_value, mix = _density_table(), self._value_table(), self._mix()
        result = np.empty_like(pixels)
        flat, out = pixels.reshape(3, -1), result.reshape(3, -1)
        for start in range(0, flat.shape[1], _STRIP_PX):
            strip = slice(start, start + _STRIP_PX)
            density = np.take(to_density, flat[:, strip], mode="clip")
            for channel in range(3):
                mixed = density[0] * mix[0, channel]
                mixed += density[1] * mix[1, channel]
                mixed += density[2] * mix[2, channel]
                np.clip(mixed, 0, _STEPS - 1, out=mixed)
                np.take(to_value, mixed.astype(np.uint16), out=out[channel, strip], mode="clip")
        return result

    def _mix(self) -> NDArray[np.float32]:
        """Return the matrix, row vectors on its left, that scales the stains' amounts in a pixel's density.

        The residual (the third row, orthogonal to both stains) is not changed.
        """
        stains = np.array([HAEMATOXYLIN, EOSIN, np.cross(HAEMATOXYLIN, EOSIN)])
        unit = stains / np.linalg.norm(stains, axis=1, keepdims=True)
        mix: NDArray[np.float64] = np.linalg.inv(unit) @ np.diag([*self.stains, 1.0]) @ unit * self.density
        return mix.astype(np.float32)

    def _value_table(self) -> NDArray[np.uint8]:
        """Return the value (uint8) of the middle of each step of density, contrast included."""
        density = (np.arange(_STEPS) + 0.5) * (_MOST_DENSITY / _STEPS)
        values = 256.0 * np.exp(-density) - 1.0
        table: NDArray[np.float64] = np.clip(np.rint(255.0 - (255.0 - values) * self.contrast), 0, 255)
        return table.astype(np.uint8)


def _contiguous(view: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a copy of a turned array, row after row; written in strips whose lines of the source stay in the cache."""
    copied = np.empty(view.shape, np.uint8)
    for x in range(0, view.shape[2], _COPIED_COLUMNS):
        strip = slice(x, x + _COPIED_COLUMNS)
        copied[:, :, strip] = view[:, :, strip]
    return copied


def _density_table() -> NDArray[np.float32]:
    """Return the density of each value 0 … 255, counted in steps of the value table."""
    density: NDArray[np.float64] = -np.log((np.arange(256) + 1.0) / 256.0)
    return (density * (_STEPS / _MOST_DENSITY)).astype(np.float32)
