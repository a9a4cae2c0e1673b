"""The objects of a synthetic slide and their positions, as decided before any pixel is rendered.

Positions do not depend on the label. A positive slide differs from the negative slide of the same seed only in the
chromatin of the nuclei in its few foci; their outlines and mean colour are the same (see ``sprites``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyfi_core.plan.box import Box
from pathology.synthetic.fields import Field, Noise

GLAND, VESSEL, FAT = range(3)


@dataclass(frozen=True)
class SlideSpec:
    """Parameters of a synthetic slide; equal specs give equal bytes.

    Attributes:
        seed: Seed of the archive.
        index: Index of the slide in the archive. All randomness comes from (seed, index), except the stain of the case.
        case: Number of the case; slides of a case have similar stains.
        size_px: Height and width of level 0.
        positive: Whether the chromatin in the foci is coarse.
        mpp_um: Microns per pixel of level 0.
        pen: Whether there are pen marks on the glass.
        blur: Whether part of the slide is out of focus.
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
        """Return a new generator for one purpose (a number), so that changes of one part do not affect others."""
        return np.random.default_rng([self.seed, self.index, purpose])


@dataclass(frozen=True)
class Tissue:
    """Outline of the tissue: the union of several distorted ellipses.

    It is defined by a depth, approximately the distance to the edge in µm, positive inside.

    Attributes:
        pieces: (n, 5): centre y and x, half axes along and across, angle; in µm and radians.
        coarse: Noise that bends the outline.
        fine: Noise that roughens it.
    """

    pieces: Field
    coarse: Noise
    fine: Noise

    def grid(self, ys_um: Field, xs_um: Field) -> Field:
        """Return the depth in µm on the grid ``ys_um × xs_um``, (len(ys), len(xs)) float32."""
        return self._depth(
            ys_um[:, None].astype(np.float32),
            xs_um[None, :].astype(np.float32),
            self.coarse.grid(ys_um, xs_um),
            self.fine.grid(ys_um, xs_um),
        )

    def at(self, y_um: Field, x_um: Field) -> Field:
        """Return the depth in µm at points, (n,) float32."""
        return self._depth(y_um, x_um, self.coarse.at(y_um, x_um), self.fine.at(y_um, x_um))

    def _depth(self, y: Field, x: Field, coarse: Field, fine: Field) -> Field:
        """Return how far points are inside of the tissue, in about µm; negative outside."""
        best = np.full(coarse.shape, -np.inf, np.float32)
        for cy, cx, long, short, angle in self.pieces.tolist():
            dy, dx = y - cy, x - cx
            along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
            radius = np.hypot(along / long, across / short)
            # Times the short half axis: from a fraction of the ellipse to about µm.
            best = np.maximum(best, (1 - radius + 0.13 * coarse) * short)
        result: Field = best + 5 * fine
        return result.astype(np.float32)


@dataclass(frozen=True)
class Anatomy:
    """All objects of a slide; ``render.Renderer`` draws boxes of it.

    Attributes:
        spec: Parameters of the slide.
        tissue: Outline of the tissue.
        fields: Smooth fields by name: ``across`` and ``along`` (distort the coordinates of the fibres), ``cells``
            (cellularity), ``wobble`` (distorts outlines).
        angle: Main direction of the fibres, radians.
        hollows: (n, 8): glands, vessels and fat cells: kind, y, x, radius, aspect ratio, angle, radius of the lumen as
            a fraction, tint; in µm.
        nests: (n, 3): clusters of large cells: y, x, radius; in µm.
        nuclei: (n, 4) int32, sorted by row: y_px, x_px, kind, index of the sprite.
        foci: Indices of the nests whose nuclei have coarse chromatin on a positive slide.
    """

    spec: SlideSpec
    tissue: Tissue
    fields: dict[str, Noise]
    angle: float
    hollows: Field
    nests: Field
    nuclei: Field
    foci: Field

    def fibre_direction(self, y_um: Field, x_um: Field) -> Field:
        """Return the direction of the fibres at points, in radians, with y pointing down."""
        step = 2.0
        down = self.across(y_um + step, x_um) - self.across(y_um - step, x_um)
        right = self.across(y_um, x_um + step) - self.across(y_um, x_um - step)
        # Along the fibres `across` is constant: perpendicular to its gradient (down, right).
        result: Field = np.arctan2(-right, down)
        return result

    def across(self, y_um: Field, x_um: Field) -> Field:
        """Return the coordinate perpendicular to the fibres at points, in µm."""
        straight = y_um * np.cos(self.angle) - x_um * np.sin(self.angle)
        bend = BEND_UM * self.fields["across"].at(y_um, x_um) + CRIMP_UM * self.fields["wobble"].at(y_um, x_um)
        result: Field = straight + bend
        return result


BEND_UM = 55.0
"""Standard deviation of the fibres from a straight line."""

CRIMP_UM = 3.5
"""Standard deviation of their small waves."""


def focus_boxes(anatomy: Anatomy) -> list[Box]:
    """Return the boxes of the foci of a positive slide, in level-0 pixels; [] for a negative slide."""
    if not anatomy.spec.positive:
        return []
    mpp = anatomy.spec.mpp_um
    boxes = []
    for y, x, radius in anatomy.nests[anatomy.foci]:
        low, high = np.floor((np.array([y, x]) - radius) / mpp), np.ceil((np.array([y, x]) + radius) / mpp)
        boxes.append(Box(int(low[0]), int(high[0]), int(low[1]), int(high[1])))
    return boxes


def tissue_truth(anatomy: Anatomy, mpp_um: float) -> Field:
    """Return the true tissue mask of the whole slide at ``mpp_um``, (n, n) bool; lumens and fat count as tissue."""
    n = max(1, round(anatomy.spec.size_um / mpp_um))
    centres = (np.arange(n) + 0.5) * mpp_um
    result: Field = anatomy.tissue.grid(centres, centres) > 0
    return result
