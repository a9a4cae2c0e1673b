"""What is where on a synthetic slide: everything is placed here, before a pixel is drawn.

Placement does not depend on the label. A positive slide differs from the negative one of the same seed only in the
drawings of the nuclei of its few foci: same outlines, same mean colour (see ``sprites``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyfi_core.plan.box import Box
from pathology.synthetic.fields import Array, Noise

GLAND, VESSEL, FAT = range(3)


@dataclass(frozen=True)
class SlideSpec:
    """All that a synthetic slide is made from; equal specs give equal bytes.

    Attributes:
        seed: of the archive.
        index: of the slide in the archive; (seed, index) is the source of all its randomness but the stain of its case.
        case: number of the case; slides of a case are stained alike.
        size_px: height and width of level 0.
        positive: whether the chromatin in its foci is coarse.
        mpp_um: microns per pixel of level 0.
        pen: draw pen marks on the glass.
        blur: leave a part of the tissue out of focus.
    """

    seed: int
    index: int
    case: int
    size_px: int
    positive: bool
    mpp_um: float = 0.5
    pen: bool = False
    blur: bool = False

    @property
    def size_um(self) -> float:
        """Height and width in µm."""
        return self.size_px * self.mpp_um

    def rng(self, purpose: int) -> np.random.Generator:
        """Return a fresh generator for one purpose, so that what one part draws does not move another."""
        return np.random.default_rng([self.seed, self.index, purpose])


@dataclass(frozen=True)
class Tissue:
    """Several irregular pieces; ``depth`` is roughly the distance to their edge in µm, positive inside.

    Attributes:
        pieces: (n, 5) of centre y, x, half axes along and across, angle; µm and radians.
        coarse: noise that bends the outline of a piece.
        fine: noise that frays it.
    """

    pieces: Array
    coarse: Noise
    fine: Noise

    def grid(self, ys_um: Array, xs_um: Array) -> Array:
        """Return the depth on a grid of coordinates."""
        return self._depth(
            ys_um[:, None].astype(np.float32),
            xs_um[None, :].astype(np.float32),
            self.coarse.grid(ys_um, xs_um),
            self.fine.grid(ys_um, xs_um),
        )

    def at(self, y_um: Array, x_um: Array) -> Array:
        """Return the depth at points."""
        return self._depth(y_um, x_um, self.coarse.at(y_um, x_um), self.fine.at(y_um, x_um))

    def _depth(self, y: Array, x: Array, coarse: Array, fine: Array) -> Array:
        best = np.full(coarse.shape, -np.inf, np.float32)
        for cy, cx, long, short, angle in self.pieces.tolist():
            dy, dx = y - cy, x - cx
            along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
            radius = np.hypot(along / long, across / short)
            best = np.maximum(best, (1 - radius + 0.13 * coarse) * short)
        result: Array = best + 5 * fine
        return result.astype(np.float32)


@dataclass(frozen=True)
class Anatomy:
    """A whole slide as placed objects; ``render`` draws any box of it.

    Attributes:
        spec: what it was made from.
        tissue: the pieces.
        fields: smooth fields by name: ``across``, ``along`` (fibre coordinates), ``cells`` (cellularity), ``wobble``.
        angle: main direction of the fibres, radians.
        hollows: (n, 8) glands, vessels and fat droplets: kind, y, x, radius, aspect, angle, lumen share, tint; µm.
        nests: (n, 3) clusters of plump cells: y, x, radius; µm.
        nuclei: (n, 4) int32, sorted by row: y_px, x_px, kind, drawing.
        foci: nests whose nuclei have coarse chromatin on a positive slide, indices into ``nests``.
    """

    spec: SlideSpec
    tissue: Tissue
    fields: dict[str, Noise]
    angle: float
    hollows: Array
    nests: Array
    nuclei: Array
    foci: Array

    def fibre_direction(self, y_um: Array, x_um: Array) -> Array:
        """Return the angle of the fibres at points, radians in image coordinates (y down)."""
        step = 2.0
        down = self.across(y_um + step, x_um) - self.across(y_um - step, x_um)
        right = self.across(y_um, x_um + step) - self.across(y_um, x_um - step)
        result: Array = np.arctan2(-right, down)
        return result

    def across(self, y_um: Array, x_um: Array) -> Array:
        """Return the coordinate across the fibres at points, µm."""
        straight = y_um * np.cos(self.angle) - x_um * np.sin(self.angle)
        bend = BEND_UM * self.fields["across"].at(y_um, x_um) + CRIMP_UM * self.fields["wobble"].at(y_um, x_um)
        result: Array = straight + bend
        return result


BEND_UM = 55.0
"""How far the fibres wander from a straight line (standard deviation)."""

CRIMP_UM = 3.5
"""How far their small waves swing."""


def focus_boxes(anatomy: Anatomy) -> list[Box]:
    """Return the boxes of the structures that make the slide positive, level-0 pixels; none on a negative slide."""
    if not anatomy.spec.positive:
        return []
    mpp = anatomy.spec.mpp_um
    boxes = []
    for y, x, radius in anatomy.nests[anatomy.foci]:
        low, high = np.floor((np.array([y, x]) - radius) / mpp), np.ceil((np.array([y, x]) + radius) / mpp)
        boxes.append(Box(int(low[0]), int(high[0]), int(low[1]), int(high[1])))
    return boxes


def tissue_truth(anatomy: Anatomy, mpp_um: float) -> Array:
    """Return where tissue was put, a bool mask of the whole slide at ``mpp_um``; lumens and fat count as tissue."""
    n = max(1, round(anatomy.spec.size_um / mpp_um))
    centres = (np.arange(n) + 0.5) * mpp_um
    result: Array = anatomy.tissue.grid(centres, centres) > 0
    return result
