"""Augmentation of training images: flips, quarter turns, and changes of stain, brightness and contrast.

The variation of an image depends only on (seed, epoch, slide), and the new colour of a pixel only on its old colour. So
each rank can read and augment its own box, and the boxes fit together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.samples.colours.density_mix import density_table, mixed_densities, value_table
from data.samples.colours.own_colours import own_colours
from data.samples.keyed import keyed_uniforms
from data.samples.turn import turned
from hyfi_core.plan.box import Box

HAEMATOXYLIN, EOSIN = (0.650, 0.704, 0.286), (0.072, 0.990, 0.105)
"""Optical density of (red, green, blue) of each stain: Ruifrok and Johnston, Anal Quant Cytol Histol 23:291 (2001)."""


@dataclass(frozen=True)
class Augment:
    """Ranges of the augmentation; 0 or False turns one off.

    Attributes:
        flips: Whether to flip, and to rotate by multiples of 90° if the image is square, else of 180°.
        stain: Range of the amounts of haematoxylin and eosin: factors in 1 ± ``stain``.
        colour: Range of brightness and contrast: factors in 1 ± ``colour``.
        own: ``package.module:function`` of the user's own change of colours, after these; empty: none.
    """

    flips: bool = True
    stain: float = 0.1
    colour: float = 0.05
    own: str = ""

    def draw(self, seed: int, epoch: int, slide_id: str, size_px: tuple[int, int]) -> Variation:
        """Return the variation of one image of ``size_px`` (height, width); it depends only on the arguments."""
        # Always draw all six numbers in [0, 1): then turning one change off does not change the others.
        of_mirror, of_turns, *of_colours = keyed_uniforms(6, "augment", seed, epoch, slide_id)
        # Only half turns of an image that is not square: its size stays.
        turns = int(of_turns * 4) if size_px[0] == size_px[1] else 2 * int(of_turns * 2)
        ranges = np.array([self.stain, self.stain, self.colour, self.colour])
        factors = 1 + (2 * np.array(of_colours) - 1) * ranges
        return Variation(
            size_px=size_px,
            mirror=self.flips and bool(of_mirror < 0.5),
            turns=turns if self.flips else 0,
            stains=(float(factors[0]), float(factors[1])),
            density=float(factors[2]),
            contrast=float(factors[3]),
            own=self.own,
            # A separate key: the other variations are the same with and without the user's function.
            own_draw=float(keyed_uniforms(1, "own", seed, epoch, slide_id)[0]) if self.own else 0.0,
        )


@dataclass(frozen=True)
class Variation:
    """The augmentation of one whole image.

    The augmented image is ``np.rot90(mirrored image, turns)`` (counter-clockwise), recoloured.

    Attributes:
        size_px: (height, width) of the image, the same before and after.
        mirror: Whether left and right are swapped, before the rotation.
        turns: Number of quarter turns; even if the image is not square.
        stains: Factors of the amounts of haematoxylin and eosin.
        density: Factor of the optical density, i.e. brightness; white stays white.
        contrast: Factor of the distance from white.
        own, own_draw: The user's own change of colours and its seed, see `data.samples.colours.own_colours`.
    """

    size_px: tuple[int, int]
    mirror: bool = False
    turns: int = 0
    stains: tuple[float, float] = (1.0, 1.0)
    density: float = 1.0
    contrast: float = 1.0
    own: str = ""
    own_draw: float = 0.0

    def __post_init__(self) -> None:
        if self.turns % 2 and self.size_px[0] != self.size_px[1]:
            raise ValueError(f"a quarter turn needs a square image, given {self.size_px[0]} × {self.size_px[1]}")

    def source(self, box: Box) -> Box:
        """Return the box of the original image that becomes ``box`` of the augmented image."""
        height, width = self.size_px
        # The inverse of `apply`: undo the quarter turns one by one, then the mirroring.
        for _ in range(self.turns % 4):
            # One turn back: turned[i, j] = original[j, height − 1 − i], with the height of the turned image.
            box = Box(box.x0, box.x1, height - box.y1, height - box.y0)
            height, width = width, height
        return Box(box.y0, box.y1, width - box.x1, width - box.x0) if self.mirror else box

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the augmented pixels of a box, given those of its :meth:`source`; (3, h, w) uint8, a new array."""
        moves, colours = self.mirror or self.turns % 4 != 0, not self._keeps_colours
        moved = turned(pixels, self.mirror, self.turns) if moves else pixels
        # Without any change, `recolour` copies the pixels: the result must be a new array.
        recoloured = self.recolour(moved) if colours or not moves else moved
        return own_colours(self.own, recoloured, self.own_draw) if self.own else recoloured

    def recolour(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the pixels with changed stain, brightness and contrast; (3, h, w) uint8, a new array.

        White (255) stays exactly white. Stains add up in optical density −log((v + 1) / 256) (Beer–Lambert law), so
        changing the amounts of stain is a 3 × 3 matrix. A pixel's result does not depend on its position in the array.
        """
        if self._keeps_colours:
            return pixels.copy()
        return mixed_densities(pixels, density_table(), self._mix(), value_table(self.contrast))

    @property
    def _keeps_colours(self) -> bool:
        # Compared exactly: ranges of 0 give factors of exactly 1.
        return self.stains == (1.0, 1.0) and self.density == 1.0 and self.contrast == 1.0

    def _mix(self) -> NDArray[np.float32]:
        """Return the matrix M for which ``d @ M`` has scaled amounts of stain, with densities d (red, green, blue).

        The residual, the component orthogonal to both stains, is scaled by ``self.density`` only.
        """
        stains = np.array([HAEMATOXYLIN, EOSIN, np.cross(HAEMATOXYLIN, EOSIN)])
        # d = amounts @ stains, so d @ inv(stains) = amounts: scale these, and mix them again. The lengths cancel.
        mix: NDArray[np.float64] = np.linalg.inv(stains) @ np.diag([*self.stains, 1.0]) @ stains * self.density
        # Rounded once, from float64: machines whose float64 results differ in the last bits hardly ever differ here.
        return mix.astype(np.float32)
