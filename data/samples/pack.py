"""Packing rectangles of tissue into one image: components, cuts, shelves. All in whole blocks of the align grid.

::

    slide                     image                 shelves: tall pieces first, each on the first
    . . a a a . . . .         a a a c c .           shelf that is tall enough and has room; else a
    . . a a a . . b b         a a a c c .           new shelf below
    c c . . . . . b b         b b . . . .
    c c . . . . . . .         b b . . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from data.components import Runs
from hyfi_core.plan.box import Box


class Shelves:
    """Free room in an image of ``height`` × ``width`` pixels; things are placed at multiples of ``align``."""

    def __init__(self, height: int, width: int, align: int) -> None:
        self._height, self._width, self._align = height, width, align
        self._shelves: list[list[int]] = []  # [top, height, next free column], heights in whole blocks
        self._below = 0

    def place(self, height: int, width: int) -> tuple[int, int] | None:
        """Reserve a rectangle; return the (y, x) of its first pixel, None if it does not fit."""
        for shelf in self._shelves:
            top, tall, x = shelf
            if height <= tall and x + width <= self._width and top + height <= self._height:
                shelf[2] = self._up(x + width)
                return top, x
        top = self._below
        if top + height > self._height or width > self._width:
            return None
        self._shelves.append([top, self._up(height), self._up(width)])
        self._below = top + self._up(height)
        return top, 0

    def _up(self, length: int) -> int:
        return -(-length // self._align) * self._align


def components(occupied: NDArray[np.bool_]) -> list[Box]:
    """Return disjoint rectangles that cover all occupied blocks: hulls of the connected pieces (corners connect).

    Hulls that overlap become one, until none do. Sorted by (y, x).
    """
    runs = Runs.from_mask(occupied)
    return sorted(_disjoint(runs.bounding_boxes(runs.components(corners=True))))


def _disjoint(boxes: Sequence[Box]) -> list[Box]:
    """Join boxes that overlap until none do."""
    ends = np.array([[b.y0, b.y1, b.x0, b.x1] for b in boxes], dtype=np.int64).reshape(-1, 4)
    alive = np.ones(len(ends), bool)
    waiting = list(range(len(ends)))
    while waiting:
        i = waiting.pop()
        if not alive[i]:
            continue
        y0, y1, x0, x1 = ends[i]
        over = alive & (ends[:, 0] < y1) & (y0 < ends[:, 1]) & (ends[:, 2] < x1) & (x0 < ends[:, 3])
        if over.sum() > 1:
            ends[i] = [
                *ends[over, 0:1].min(0),
                *ends[over, 1:2].max(0),
                *ends[over, 2:3].min(0),
                *ends[over, 3:4].max(0),
            ]
            alive &= ~over
            alive[i] = True
            waiting.append(i)
    return [Box(*map(int, row)) for row in ends[alive]]


def cut(box: Box, occupied: NDArray[np.bool_], side: int) -> Iterator[Box]:
    """Cut a rectangle into squares of at most ``side`` blocks, each shrunk to its occupied blocks; empty ones go."""
    for y in range(box.y0, box.y1, side):
        for x in range(box.x0, box.x1, side):
            square = Box(y, min(y + side, box.y1), x, min(x + side, box.x1))
            shrunk = shrink(square, occupied)
            if not shrunk.empty:
                yield shrunk


def shrink(box: Box, occupied: NDArray[np.bool_]) -> Box:
    """Return the hull of the occupied blocks in ``box``; an empty box for none."""
    inside = occupied[box.slices()]
    rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
    if not len(rows):
        return Box(box.y0, box.y0, box.x0, box.x0)
    return Box(
        box.y0 + int(rows[0]), box.y0 + int(rows[-1]) + 1, box.x0 + int(columns[0]), box.x0 + int(columns[-1]) + 1
    )


def place_all(boxes: Sequence[Box], size_px: tuple[int, int], align: int) -> list[tuple[Box, tuple[int, int]]] | None:
    """Place all boxes (pixels), tall ones first; return each with the (y, x) of its place, None if one has no room."""
    if sum(box.area for box in boxes) > size_px[0] * size_px[1]:
        return None
    shelves = Shelves(*size_px, align)
    placed = []
    for box in sorted(boxes, key=_tall_first):
        place = shelves.place(box.height, box.width)
        if place is None:
            return None
        placed.append((box, place))
    return placed


def place_most(
    boxes: Sequence[Box], tissue_px: Sequence[int], size_px: tuple[int, int], align: int
) -> list[tuple[Box, tuple[int, int]]]:
    """Place the boxes with most tissue: as many as fit when sorted by it, then whatever else finds room."""
    ranked = [box for _, box in sorted(zip(tissue_px, boxes, strict=True), key=lambda item: (-item[0], item[1]))]
    fits, fails = 0, len(ranked) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if place_all(ranked[:middle], size_px, align) is None:
            fails = middle
        else:
            fits = middle
    shelves = Shelves(*size_px, align)
    wanted = sorted(ranked[:fits], key=_tall_first) + ranked[fits:]
    places = [(box, shelves.place(box.height, box.width)) for box in wanted]
    return [(box, place) for box, place in places if place is not None]


def _tall_first(box: Box) -> tuple[int, int, Box]:
    return -box.height, -box.width, box
