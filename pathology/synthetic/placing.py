"""Positions of tissue, glands, vessels, fat, nests and nuclei on a synthetic slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pathology.synthetic.anatomy import FAT, GLAND, VESSEL, Anatomy, SlideSpec, Tissue
from pathology.synthetic.fields import Field, Noise
from pathology.synthetic.sprites import ANGLES, COARSE, DUSTY, LYMPHOCYTE, OVAL, RED_CELL, SPINDLE, VARIANTS

_CELL_UM = 8.0  # cell of the raster that keeps objects from overlapping

# Objects per mm² of tissue.
_GLANDS, _VESSELS, _NESTS, _SPINDLES, _SCATTERED, _AGGREGATES = 75.0, 14.0, 70.0, 2600.0, 1500.0, 7.0


def make_anatomy(spec: SlideSpec) -> Anatomy:
    """Place all objects of a slide; the same spec gives the same result."""
    rng = spec.rng(1)
    tissue = _tissue(spec, rng)
    fields = {
        "across": Noise.make(rng, 210.0),
        "along": Noise.make(rng, 230.0),
        "cells": Noise.make(rng, 140.0),
        "wobble": Noise.make(rng, 34.0),
    }
    angle = rng.uniform(0, np.pi)
    raster = _Raster(spec, tissue)
    hollows = _hollows(rng, raster, fields["cells"])
    nests = _nests(rng, raster)
    # Up to seven foci: about a third of the nests, if there are few.
    count = min((len(nests) + 2) // 3, int(rng.integers(5, 8)))
    foci = np.sort(rng.choice(len(nests), count, replace=False)) if count else np.zeros(0, np.int64)
    # Nuclei are placed by the direction of fibres, which the anatomy computes; so it is made without nuclei first.
    no_nuclei = np.zeros((0, 4), np.int32)
    without_nuclei = Anatomy(spec, tissue, fields, angle, hollows, nests, no_nuclei, foci)
    nuclei = np.concatenate(
        [
            _stroma(without_nuclei, rng, raster),
            _around_hollows(without_nuclei, rng),
            _in_nests(without_nuclei, rng),
            _aggregates(rng, raster),
        ]
    )
    return replace(without_nuclei, nuclei=_pixels(spec, nuclei))


def _tissue(spec: SlideSpec, rng: np.random.Generator) -> Tissue:
    """Place two to four ellipses at random; together they have about half the area of the slide."""
    size, count = spec.size_um, int(rng.integers(2, 5))
    pieces: list[tuple[float, ...]] = []
    for _ in range(count):
        centre_y, centre_x = _farthest(rng.uniform(0.2, 0.8, (40, 2)) * size, [piece[:2] for piece in pieces])
        area = 0.56 * size * size / count * rng.uniform(0.75, 1.2)
        aspect = rng.uniform(1.05, 1.9)
        half_across = np.sqrt(area / np.pi / aspect)  # as the area of an ellipse is π · half_along · half_across
        angle = rng.uniform(0, np.pi)
        pieces.append((centre_y, centre_x, half_across * aspect, half_across, angle))
    return Tissue(np.array(pieces), coarse=Noise.make(rng, size / 9), fine=Noise.make(rng, 24.0))


def _farthest(candidates: Field, taken: Sequence[tuple[float, ...]]) -> Field:
    """Return the candidate (y, x) whose nearest taken point is the farthest; the first one if none is taken."""
    at = 0
    if taken:
        to_taken = candidates[:, None] - np.array(taken)  # (candidates, taken, 2)
        at = int(np.hypot(to_taken[..., 0], to_taken[..., 1]).min(axis=1).argmax())
    farthest: Field = candidates[at]
    return farthest


class _Raster:
    """The slide in cells of 8 µm: the depth of each cell in the tissue, and whether an object occupies it."""

    def __init__(self, spec: SlideSpec, tissue: Tissue) -> None:
        # Cells along a side of the slide.
        self.side = max(1, int(np.ceil(spec.size_um / _CELL_UM)))
        centres = (np.arange(self.side) + 0.5) * _CELL_UM
        # In parts of rows: the coordinates of pieces take several floats for each cell.
        parts = np.array_split(centres, self.side // 256 + 1)
        self.depth_um = np.concatenate([tissue.grid(rows, centres) for rows in parts])
        self.taken = np.zeros((self.side, self.side), bool)
        self.tissue_mm2 = float((self.depth_um > 0).sum()) * _CELL_UM**2 / 1e6

    def count(self, rng: np.random.Generator, per_mm2: float) -> int:
        """Return a random number of objects for a density, from a Poisson distribution."""
        return int(rng.poisson(per_mm2 * self.tissue_mm2))

    def points(self, rng: np.random.Generator, count: int, depth_um: float) -> Field:
        """Return ``count`` random points (y, x) in µm at least ``depth_um`` deep in the tissue."""
        inside = np.flatnonzero(self.depth_um > depth_um)
        if not len(inside):
            return np.zeros((0, 2))
        cell = rng.choice(inside, count)
        return (np.stack([cell // self.side, cell % self.side], 1) + rng.uniform(0, 1, (count, 2))) * _CELL_UM

    def take(self, y_um: float, x_um: float, radius_um: float) -> bool:
        """Reserve a disc; return False without reserving if it overlaps another object or the tissue's edge."""
        # The part of the raster around the disc, and the distance of its cells' centres from the disc's centre.
        low = [max(0, int((v - radius_um) / _CELL_UM)) for v in (y_um, x_um)]
        high = [min(self.side, int((v + radius_um) / _CELL_UM) + 1) for v in (y_um, x_um)]
        window = (slice(low[0], high[0]), slice(low[1], high[1]))
        y = (np.arange(low[0], high[0]) + 0.5)[:, None] * _CELL_UM - y_um
        x = (np.arange(low[1], high[1]) + 0.5)[None, :] * _CELL_UM - x_um
        disc = y * y + x * x <= radius_um**2
        if (self.taken[window] & disc).any() or (self.depth_um[window][disc] < 3).any():
            return False
        self.taken[window] |= disc
        return True

    def free(self, points: Field) -> Field:
        """Return a mask of the points (y, x), in µm, that are not in a reserved disc."""
        cell = np.clip((points / _CELL_UM).astype(np.int64), 0, self.side - 1)
        result: Field = ~self.taken[cell[:, 0], cell[:, 1]]
        return result


def _hollows(rng: np.random.Generator, raster: _Raster, cells: Noise) -> Field:
    """Place glands, vessels and fat cells; see `Anatomy.hollows`."""
    rows: list[tuple[float, ...]] = []
    # Several times as many tries as objects: most are refused, because they would overlap.
    for y, x in raster.points(rng, 4 * raster.count(rng, _GLANDS), 30):
        radius, aspect = rng.uniform(19, 46), rng.uniform(1, 1.9)
        shape = (radius, aspect, rng.uniform(0, np.pi), rng.uniform(0.3, 0.58), rng.uniform(0, 1))
        if cells.at(y, x) > -0.4 and raster.take(y, x, radius * np.sqrt(aspect) + 7):
            rows.append((GLAND, y, x, *shape))
    for y, x in raster.points(rng, raster.count(rng, _VESSELS), 20):
        radius, aspect = rng.uniform(9, 24), rng.uniform(1, 2.2)
        shape = (radius, aspect, rng.uniform(0, np.pi), 0.78, rng.uniform(0, 1))
        if raster.take(y, x, radius * np.sqrt(aspect) + 4):
            rows.append((VESSEL, y, x, *shape))
    for y, x in raster.points(rng, 1 + int(raster.tissue_mm2), 10):  # a few islands of fat
        for dy, dx in rng.normal(0, 75, (90, 2)):
            radius = rng.uniform(14, 30)
            inside = 0 <= y + dy < raster.side * _CELL_UM and 0 <= x + dx < raster.side * _CELL_UM
            if inside and raster.take(y + dy, x + dx, radius):
                rows.append((FAT, y + dy, x + dx, radius + 2, rng.uniform(1, 1.25), rng.uniform(0, np.pi), 0.93, 0.5))
    return np.array(rows, np.float64).reshape(-1, 8)


def _nests(rng: np.random.Generator, raster: _Raster) -> Field:
    """Place nests; see `Anatomy.nests`."""
    rows = []
    for y, x in raster.points(rng, 12 * raster.count(rng, _NESTS), 24):
        radius = rng.uniform(22, 38)
        if raster.take(y, x, radius + 2):
            rows.append((y, x, radius))
    return np.array(rows, np.float64).reshape(-1, 3)


def _rows(points: Field, kind: Field | int, sprite: Field) -> Field:
    """Return rows of `Anatomy.nuclei`, but with positions in µm, not pixels."""
    return np.column_stack([points, np.broadcast_to(kind, len(points)), sprite])


def _aligned(angle: Field, rng: np.random.Generator, kind: int) -> Field:
    """Return the indices of sprites of elongated nuclei that lie along ``angle``."""
    turn = np.round(angle / np.pi * ANGLES).astype(np.int64) % ANGLES
    return turn * VARIANTS[kind] + rng.integers(0, VARIANTS[kind], len(turn))


def _stroma(anatomy: Anatomy, rng: np.random.Generator, raster: _Raster) -> Field:
    """Return spindle nuclei along the fibres, and scattered round ones, as rows of `Anatomy.nuclei` in µm."""
    spindles = raster.points(rng, raster.count(rng, _SPINDLES), depth_um=2)
    # Fewer remain where the field of cellularity is low.
    cellularity = anatomy.fields["cells"].at(spindles[:, 0], spindles[:, 1])
    remains = rng.normal(0, 0.5, len(spindles)) < cellularity + 0.5
    spindles = spindles[raster.free(spindles) & remains]
    along = anatomy.fibre_direction(spindles[:, 0], spindles[:, 1]) + rng.normal(0, 0.25, len(spindles))
    round_ones = raster.points(rng, raster.count(rng, _SCATTERED), depth_um=2)
    round_ones = round_ones[raster.free(round_ones)]
    plump = rng.random(len(round_ones)) < 0.6
    kind = np.where(plump, DUSTY, LYMPHOCYTE)
    return np.concatenate(
        [
            _rows(spindles, SPINDLE, _aligned(along, rng, SPINDLE)),
            _rows(round_ones, kind, rng.integers(0, np.where(plump, VARIANTS[DUSTY], VARIANTS[LYMPHOCYTE]))),
        ]
    )


def _around_hollows(anatomy: Anatomy, rng: np.random.Generator) -> Field:
    """Return nuclei in the walls of glands and vessels, and red cells in vessels, as rows of `Anatomy.nuclei` in µm."""
    parts = [np.zeros((0, 4))]
    for kind, y, x, radius, aspect, angle, lumen, _ in anatomy.hollows:
        if kind == FAT:
            continue
        # Distance between nuclei in µm, and their distance from the centre as a fraction of the radius.
        spacing, reach = (6.6, 0.78) if kind == GLAND else (22.0, 0.93)
        count = max(4, int(6.28 * radius * reach * np.sqrt(aspect) / spacing))
        turn = np.arange(count) / count * 2 * np.pi + rng.normal(0, 0.25 / count * 6.28, count)
        reaches = reach + rng.normal(0, 0.045, count) if kind == GLAND else np.full(count, reach)
        points, outward = _on_ring(anatomy, (y, x, radius, aspect, angle), turn, reaches)
        # Nuclei of glands point outwards, those of vessels lie along the wall.
        along = outward if kind == GLAND else outward + np.pi / 2
        lining = OVAL if kind == GLAND else SPINDLE
        parts.append(_rows(points, lining, _aligned(along, rng, lining)))
        if kind == VESSEL:
            blood = rng.integers(4, 26)
            points, _ = _on_ring(
                anatomy,
                (y, x, radius, aspect, angle),
                rng.uniform(0, 6.28, blood),
                lumen * 0.85 * np.sqrt(rng.uniform(0, 1, blood)),
            )
            parts.append(_rows(points, RED_CELL, rng.integers(0, VARIANTS[RED_CELL], blood)))
    return np.concatenate(parts)


def _on_ring(anatomy: Anatomy, shape: tuple[float, ...], turn: Field, fraction: Field) -> tuple[Field, Field]:
    """Return points at a ``fraction`` of a hollow's distorted radius in direction ``turn``, and their outward angle."""
    y, x, radius, aspect, angle = shape
    long, short = radius * np.sqrt(aspect), radius / np.sqrt(aspect)
    reach = fraction.copy()
    for _ in range(3):  # fixed-point iteration: the radius at a point depends on the wobble field at that point
        along, across = np.cos(turn) * long * reach, np.sin(turn) * short * reach
        px = x + along * np.cos(angle) - across * np.sin(angle)
        py = y + along * np.sin(angle) + across * np.cos(angle)
        reach = fraction / (1 + WOBBLE * anatomy.fields["wobble"].at(py, px))
    return np.stack([py, px], 1), np.arctan2(py - y, px - x)


WOBBLE = 0.11
"""Relative standard deviation of the radius of a gland along its outline."""


def _in_nests(anatomy: Anatomy, rng: np.random.Generator) -> Field:
    """Fill each nest with large nuclei on a jittered lattice; in foci of a positive slide their chromatin is coarse."""
    parts = [np.zeros((0, 4))]
    step = 12.5  # µm between neighbouring nuclei
    lattice = np.array([(i * step * 0.87, (j + i % 2 / 2) * step) for i in range(-4, 5) for j in range(-4, 5)])
    foci = set(anatomy.foci.tolist()) if anatomy.spec.positive else set()
    for number, (y, x, radius) in enumerate(anatomy.nests):
        turn = rng.uniform(0, np.pi)
        rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        offsets = lattice @ rotation + rng.normal(0, 1.7, lattice.shape)
        # Only nuclei that are wholly inside the nest; a few of them are missing.
        offsets = offsets[(np.hypot(*offsets.T) < radius - 4) & (rng.random(len(offsets)) < 0.92)]
        # Drawn for every nest, so that the same nuclei follow on positive and negative slides.
        sprite, may_be_coarse = rng.integers(0, VARIANTS[DUSTY], len(offsets)), rng.random(len(offsets)) < 0.95
        kind = np.where(may_be_coarse & (number in foci), COARSE, DUSTY)
        parts.append(_rows(offsets + np.array([y, x]), kind, sprite))
    return np.concatenate(parts)


def _aggregates(rng: np.random.Generator, raster: _Raster) -> Field:
    """Return the nuclei of clusters of lymphocytes, as rows of `Anatomy.nuclei` in µm."""
    parts = [np.zeros((0, 4))]
    for y, x in raster.points(rng, raster.count(rng, _AGGREGATES), depth_um=15):
        n = int(rng.integers(25, 140))
        # It grows with the root of the number, so that small and large clusters are equally dense.
        spread_um = 3.2 * np.sqrt(n) * 0.7
        points = np.array([y, x]) + rng.normal(0, spread_um, (n, 2))
        # The raster's cell of each nucleus. Those off the slide, on glass or in another object are left out.
        cell = (points / _CELL_UM).astype(np.int64)
        on_slide = (points >= 0).all(1) & (cell < raster.side).all(1)
        points, cell = points[on_slide], cell[on_slide]
        points = points[raster.free(points) & (raster.depth_um[cell[:, 0], cell[:, 1]] > 2)]
        parts.append(_rows(points, LYMPHOCYTE, rng.integers(0, VARIANTS[LYMPHOCYTE], len(points))))
    return np.concatenate(parts)


def _pixels(spec: SlideSpec, nuclei: Field) -> Field:
    """Return the nuclei inside the slide, with positions in level-0 pixels, sorted by row."""
    rows = np.column_stack([np.round(nuclei[:, :2] / spec.mpp_um), nuclei[:, 2:]]).astype(np.int32)
    rows = rows[((rows[:, :2] >= 0) & (rows[:, :2] < spec.size_px)).all(1)]
    result: Field = rows[np.argsort(rows[:, 0], kind="stable")]
    return result
