"""Renders boxes of a synthetic slide: first stain densities, then colours by the Beer-Lambert law.

The slide is rendered in blocks of 1024 pixels, each with a margin for objects that extend into it. So the pixels of a
block do not depend on the requested box, and memory does not depend on the slide's size.
"""

from __future__ import annotations

import numpy as np

from hyfi_core.plan.box import Box
from pathology.synthetic import artefacts
from pathology.synthetic.anatomy import BEND_UM, CRIMP_UM, FAT, GLAND, VESSEL, Anatomy, SlideSpec
from pathology.synthetic.fields import Field, enlarge
from pathology.synthetic.placing import WOBBLE
from pathology.synthetic.sprites import (
    E_SCALE,
    EOSIN,
    H_SCALE,
    HAEMATOXYLIN,
    NEST_E,
    NEST_H,
    NUCLEOPLASM_E,
    RED_CELL,
    TEXTURE_PX,
    fibres,
    grains,
    library,
    pigment_light,
)

BLOCK_PX = 1024
_NODE_PX = 16  # smooth fields are evaluated this far apart and interpolated


class Renderer:
    """Renders boxes of one slide; holds its objects and its colour table (a few MB).

    Args:
        anatomy: The objects of the slide.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.mpp = anatomy.spec.mpp_um
        self.library = library(self.mpp)
        self.colours = stain_table(anatomy.spec)
        self.pigment = pigment_light(self.library.dust)
        self.artefacts = artefacts.Artefacts(anatomy.spec)
        # Twice the reach of a sprite: those centred outside the block may extend into it, and only those that are
        # wholly inside the margin can be stamped. Rounded up to whole steps between the nodes of smooth fields.
        reach = 2 * self.library.reach_px + (artefacts.BLUR_REACH_PX if anatomy.spec.blur else 0)
        self.margin_px = -(-reach // _NODE_PX) * _NODE_PX

    def read(self, box: Box) -> Field:
        """Return the pixels of a box inside the slide, a new (h, w, 3) uint8 array."""
        out = np.empty((box.height, box.width, 3), np.uint8)
        for y in range(box.y0 // BLOCK_PX * BLOCK_PX, box.y1, BLOCK_PX):
            for x in range(box.x0 // BLOCK_PX * BLOCK_PX, box.x1, BLOCK_PX):
                # Always whole blocks of one grid: pixels must not depend on the box that is read.
                block = Box(y, y + BLOCK_PX, x, x + BLOCK_PX)
                part = block.intersect(box)
                out[part.relative_to(box).slices()] = self._block(block)[part.relative_to(block).slices()]
        return out

    def _block(self, block: Box) -> Field:
        """Return the pixels ``(BLOCK_PX, BLOCK_PX, 3)`` of a block."""
        m = self.margin_px
        planes = _Planes(self, Box(block.y0 - m, block.y1 + m, block.x0 - m, block.x1 + m))
        if planes.tissue:
            planes.hollows()
            planes.nests()
            planes.nuclei()
        inner = (slice(m, m + BLOCK_PX), slice(m, m + BLOCK_PX))
        sharp = planes.haematoxylin_u8, planes.eosin_u8, planes.pigment
        h, e, pigment = (plane[inner] for plane in self.artefacts.blur(sharp, planes.box))
        # One lookup gives all three colours of a pixel: exp of every pixel would take many times as long.
        index = h.astype(np.uint16) << 8 | e
        pixels = self.colours[index].view(np.uint8).reshape(BLOCK_PX, BLOCK_PX, 4)[..., :3]
        where = np.nonzero(pigment)
        pixels[where] = pixels[where] * self.pigment[pigment[where]] + np.float32(0.5)
        return self.artefacts.pen(pixels, block)


class _Planes:
    """The haematoxylin, eosin and pigment planes of one box: how much of each is at a pixel, 0 to 255.

    ``haematoxylin`` and ``eosin`` are float32; from them `nuclei` makes ``haematoxylin_u8`` and ``eosin_u8``.
    """

    def __init__(self, renderer: Renderer, box: Box) -> None:
        self.renderer, self.anatomy, self.box, self.mpp = renderer, renderer.anatomy, box, renderer.mpp
        self.rows_um = np.arange(box.y0, box.y1 + 1, _NODE_PX) * self.mpp
        self.columns_um = np.arange(box.x0, box.x1 + 1, _NODE_PX) * self.mpp
        # Distance from the tissue's outline in µm, positive inside. Its shadow on the glass extends less than 20 µm.
        nodes = self.anatomy.tissue.grid(self.rows_um, self.columns_um)
        self.tissue = bool((nodes > -20).any())
        self.grain = self._texture()
        if self.tissue:
            self._base(enlarge(nodes, _NODE_PX))
        else:
            self.haematoxylin_u8 = np.zeros(box.shape, np.uint8)
            self.eosin_u8 = (2.5 + 1.2 * np.clip(self.grain, -2, 2)).astype(np.uint8)
        self.pigment = np.zeros(box.shape, np.uint8)

    def _texture(self) -> Field:
        y, x = np.arange(self.box.y0, self.box.y1) % TEXTURE_PX, np.arange(self.box.x0, self.box.x1) % TEXTURE_PX
        result: Field = grains()[y][:, x]
        return result

    def _field(self, name: str) -> Field:
        return self.anatomy.fields[name].grid(self.rows_um, self.columns_um)

    def _fibres(self) -> Field:
        """Return the fibre texture of the box, looked up at its distorted coordinates."""
        angle = self.anatomy.angle
        y, x = self.rows_um[:, None], self.columns_um[None, :]
        across = y * np.cos(angle) - x * np.sin(angle) + BEND_UM * self._field("across")
        across = across + CRIMP_UM * self._field("wobble")
        along = y * np.sin(angle) + x * np.cos(angle) + BEND_UM * self._field("along")
        scale = np.float32(2)  # texture pixels per µm
        # Up to here only at the nodes of the smooth fields; the pixels between are interpolated.
        v = enlarge((across * scale).astype(np.float32), _NODE_PX).astype(np.int32)
        u = enlarge((along * scale).astype(np.float32), _NODE_PX).astype(np.int32)
        # The texture repeats: its side is a power of two, so a mask is the remainder, for negative numbers too.
        index = (v & (TEXTURE_PX - 1)) * TEXTURE_PX + (u & (TEXTURE_PX - 1))
        return fibres().reshape(-1)[index]

    def _base(self, depth: Field) -> None:
        """Paint stroma and glass: fibres, rough edges, and a faint shadow of the tissue on the glass next to it.

        Args:
            depth: Distance from the tissue's outline, positive inside.
        """
        fibre = self._fibres()
        self.wobble = enlarge(self._field("wobble"), _NODE_PX)
        cells = enlarge(self._field("cells"), _NODE_PX)
        depth = depth + (fibre - 0.5) * 9 + self.grain * 0.6
        self.cover = np.clip(depth / 2.5 + 0.5, 0, 1)
        rim = np.clip(1 - depth / 9, 0, 1)  # edges have more eosin
        density = np.clip(0.50 + 0.06 * cells, 0.3, 0.75)
        eosin = density * (0.12 + 1.3 * fibre) + 0.05 * self.grain * fibre + 0.10 * rim
        # Limited, so that only red cells are redder.
        self.eosin = self.cover * np.minimum(200 * eosin, 110 + 50 * eosin)
        self.haematoxylin = self.cover * (13 + 7 * np.clip(cells, -1, 2) + 4 * self.grain)
        self.haematoxylin += (1 - self.cover) * 7 * np.clip(1 + depth / 14, 0, 1)  # the shadow
        self.eosin += 2.5 + np.clip(self.grain, -2, 2)

    def _blend(self, view: tuple[slice, slice], opacity: Field, eosin: Field, haematoxylin: Field | float) -> None:
        """Replace values of both planes by others where ``opacity`` is 1; keep them where it is 0, and mix between."""
        self.eosin[view] += opacity * (eosin - self.eosin[view])
        self.haematoxylin[view] += opacity * (haematoxylin - self.haematoxylin[view])

    def hollows(self) -> None:
        """Paint glands, vessels and fat cells over the stroma."""
        for kind, y, x, radius, aspect, angle, lumen, tint in self.anatomy.hollows.tolist():
            view = self._near(y, x, radius * np.sqrt(aspect) * 1.5 + 6)
            if view is not None:
                self._hollow(view, int(kind), (y, x, radius, aspect, angle), lumen, tint)

    def _near(self, y_um: float, x_um: float, reach_um: float) -> tuple[slice, slice] | None:
        """Return the slices of the planes within reach of a point; None if there are none."""
        y, x, r = y_um / self.mpp, x_um / self.mpp, reach_um / self.mpp
        area = Box(int(y - r), int(y + r) + 1, int(x - r), int(x + r) + 1).intersect(self.box)
        return None if area.empty else area.relative_to(self.box).slices()

    def _coordinates(self, view: tuple[slice, slice], y_um: float, x_um: float) -> tuple[Field, Field]:
        """Return y and x of a view relative to a point, in µm, (h, 1) and (1, w)."""
        rows = (np.arange(view[0].start, view[0].stop, dtype=np.float32) + self.box.y0) * self.mpp - y_um
        columns = (np.arange(view[1].start, view[1].stop, dtype=np.float32) + self.box.x0) * self.mpp - x_um
        return rows.astype(np.float32)[:, None], columns.astype(np.float32)[None, :]

    def _hollow(
        self, view: tuple[slice, slice], kind: int, shape: tuple[float, ...], lumen: float, tint: float
    ) -> None:
        """Draw a gland, vessel or fat cell: a wall around a hole.

        Args:
            view: The part of the planes that it may touch.
            kind: Kind of the structure: gland, vessel or fat cell.
            shape: y and x of its centre and its radius, in µm; ratio of its axes; angle.
            lumen: Radius of the hole, as a fraction of the radius.
            tint: From 0, eosin, to 1, haematoxylin.
        """
        y_um, x_um, radius, aspect, angle = shape
        y, x = self._coordinates(view, y_um, x_um)
        along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        # Distance from the centre, 1 at the outline.
        rho = np.hypot(along / np.sqrt(aspect), across * np.sqrt(aspect)) / radius
        rho *= 1 + (WOBBLE if kind != FAT else 0.03) * self.wobble[view]
        # Edges are 1.4 µm wide, and the inner one of glands is frayed.
        grain, per_edge = self.grain[view], np.float32(radius / 1.4)
        inside = np.clip((1 - rho) * per_edge + 0.5, 0, 1)
        frayed_lumen = lumen + 0.035 * grain * (kind == GLAND)
        hole = np.clip((frayed_lumen - rho) * per_edge + 0.5, 0, 1)
        e_wall, h_wall = _WALLS[kind]
        if kind == GLAND:  # paler towards the lumen; some glands are bluer
            apex = 0.70 + 0.34 * np.clip((rho - lumen) / (1 - lumen), 0, 1)
            e_wall, h_wall = e_wall * apex * (1.1 - 0.25 * tint), h_wall * (0.75 + 0.6 * tint)
        content = 30 * max(0.0, tint - 0.55) if kind == GLAND else 0.0
        self._blend(view, inside, e_wall * (1 + 0.10 * grain), h_wall * (1 + 0.12 * grain))
        self._blend(view, hole, 3 + content * (1 + 0.3 * grain), 0.3 * content)
        if kind == GLAND:  # the clear cleft around a gland, an artefact of shrinkage
            cleft = np.exp(-np.square((rho - 1.0) * radius - 2.0) / 2.5) * np.clip(
                0.35 + 0.3 * self.wobble[view], 0, 0.75
            )
            self.eosin[view] *= 1 - cleft
            self.haematoxylin[view] *= 1 - cleft

    def nests(self) -> None:
        """Paint the pale cytoplasm of nests."""
        for y_um, x_um, radius in self.anatomy.nests.tolist():
            view = self._near(y_um, x_um, radius * 1.4)
            if view is None:
                continue
            y, x = self._coordinates(view, y_um, x_um)
            # Distance from the centre, 1 at the outline, which is not quite round.
            rho = np.hypot(y, x) / radius * (1 + 0.13 * self.wobble[view])
            # The edge is 3 µm wide; some of what is below shines through.
            opacity = np.clip((1 - rho) * radius / 3 + 0.5, 0, 1) * 0.85
            grain = self.grain[view]
            self._blend(view, opacity, 255 * NEST_E * (1 + 0.12 * grain), 255 * NEST_H * (1 + 0.2 * grain))

    def nuclei(self) -> None:
        """Stamp the sprites of nuclei and red cells; where they overlap, the darker value counts."""
        self.eosin_u8 = np.clip(self.eosin, 0, 255).astype(np.uint8)
        self.haematoxylin_u8 = np.clip(self.haematoxylin, 0, 255).astype(np.uint8)
        library = self.renderer.library
        reach, stamps, pigment = library.reach_px, library.stamps, library.pigment
        cover = [shape.astype(np.uint16) for shape in library.cover]
        all_nuclei = self.anatomy.nuclei
        # Nuclei are sorted by row, so those of a block are a slice.
        low, high = np.searchsorted(all_nuclei[:, 0], [self.box.y0 + reach, self.box.y1 - reach])
        inside = all_nuclei[low:high]
        inside = inside[(inside[:, 1] >= self.box.x0 + reach) & (inside[:, 1] < self.box.x1 - reach)]
        for y, x, kind, sprite in (inside - [self.box.y0, self.box.x0, 0, 0]).tolist():
            stamp = stamps[kind][sprite]
            r = stamp.shape[0] // 2
            if kind in pigment:  # the nucleoplasm is clear and hides what is below it
                for plane, level in ((self.eosin_u8, NUCLEOPLASM_E), (self.haematoxylin_u8, 0), (self.pigment, 0)):
                    view = plane[y - r : y + r + 1, x - r : x + r + 1]
                    view[:] = (view * (255 - cover[sprite]) + level * cover[sprite]) // 255
            plane = self.eosin_u8 if kind == RED_CELL else self.haematoxylin_u8
            view = plane[y - r : y + r + 1, x - r : x + r + 1]
            # The maximum does not depend on the order, which differs between blocks.
            np.maximum(view, stamp, out=view)
            if kind in pigment:
                view = self.pigment[y - r : y + r + 1, x - r : x + r + 1]
                np.maximum(view, pigment[kind][sprite], out=view)


_WALLS = {GLAND: (95.0, 42.0), VESSEL: (150.0, 16.0), FAT: (120.0, 8.0)}
"""Values of the eosin and haematoxylin planes in the walls of glands, vessels and fat cells."""


def stain_table(spec: SlideSpec) -> Field:
    """Return the colour for each pair of plane values, (65536,) uint32 of bytes R, G, B, 0 at index ``256 * H + E``.

    Stain colours, their strength and the colour of glass vary from case to case; stains also a little from slide to
    slide.
    """
    # Seeded by the case, not by the slide: all slides of a case were stained together. 1,000,003 is no slide's index.
    case = np.random.default_rng([spec.seed, 1_000_003, spec.case])
    slide = spec.rng(2)
    h = np.array(HAEMATOXYLIN) + case.normal(0, 0.03, 3) + slide.normal(0, 0.006, 3)
    e = np.array(EOSIN) + case.normal(0, 0.03, 3) + slide.normal(0, 0.006, 3)
    h_gain, e_gain = np.clip(np.exp(case.normal(0, 0.10, 2) + slide.normal(0, 0.03, 2)), 0.75, 1.3)
    glass = np.array([243.0, 242.0, 244.0]) + case.normal(0, 1.2, 3)
    levels = np.arange(256)
    density = (levels * H_SCALE * h_gain)[:, None, None] * h + (levels * E_SCALE * e_gain)[None, :, None] * e
    table = np.zeros((256, 256, 4), np.uint8)
    table[..., :3] = np.clip(glass * np.exp(-density) + 0.5, 0, 255)
    packed: Field = table.view(np.uint32).reshape(-1)
    return packed
