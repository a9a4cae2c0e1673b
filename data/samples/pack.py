"""Shelf packing of rectangles of tissue into one image, in whole blocks of the alignment grid.

::

    slide                     image                 tall pieces first, each on the first shelf that is
    . . a a a . . . .         a a a c c .           tall enough and has room, else on a new shelf below
    . . a a a . . b b         a a a c c .
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
    """Shelves in an image of ``height`` × ``width`` pixels; rectangles start at multiples of ``align``."""

    def __init__(self, height: int, width: int, align: int) -> None:
        self._height, self._width, self._align = height, width, align
        self._shelves: list[list[int]] = []  # [top, height, next free column], heights in whole blocks
        self._next_top = 0

    def place(self, height: int, width: int) -> tuple[int, int] | None:
        """Reserve a rectangle; return the (y, x) of its first pixel, None if it does not fit."""
        for shelf in self._shelves:
            top, shelf_height, free_x = shelf
            # Shelves are whole blocks high, so the last shelf may reach beyond the image.
            if height <= shelf_height and free_x + width <= self._width and top + height <= self._height:
                shelf[2] = self._whole_blocks(free_x + width)
                return top, free_x
        top = self._next_top
        if top + height > self._height or width > self._width:
            return None
        # In whole blocks, so that the next rectangle and the next shelf start on the grid.
        self._shelves.append([top, self._whole_blocks(height), self._whole_blocks(width)])
        self._next_top = top + self._whole_blocks(height)
        return top, 0

    def _whole_blocks(self, length: int) -> int:
        """Return the length, rounded up to a multiple of ``align``."""
        return -(-length // self._align) * self._align


def components(occupied: NDArray[np.bool_]) -> list[Box]:
    """Return disjoint boxes that cover all occupied blocks, sorted by (y, x).

    They are the bounding boxes of the 8-connected components; boxes that overlap are merged until none do.
    """
    runs = Runs.from_mask(occupied)
    return sorted(_disjoint(runs.bounding_boxes(runs.components(corners=True))))


def corners_of(boxes: Sequence[Box]) -> NDArray[np.int64]:
    """Return ``(n, 4)``: y0, y1, x0, x1 of each box."""
    return np.array([[b.y0, b.y1, b.x0, b.x1] for b in boxes], dtype=np.int64).reshape(-1, 4)


def overlapping(corners: NDArray[np.int64], box: Box) -> NDArray[np.bool_]:
    """Return ``(n,)``: whether each box of `corners_of` overlaps ``box``."""
    rows = (corners[:, 0] < box.y1) & (box.y0 < corners[:, 1])
    columns = (corners[:, 2] < box.x1) & (box.x0 < corners[:, 3])
    return np.asarray(rows & columns, dtype=bool)


def _disjoint(boxes: Sequence[Box]) -> list[Box]:
    """Return the boxes after replacing overlapping ones by their hull, again and again until none overlap."""
    corners = corners_of(boxes)
    alive = np.ones(len(corners), bool)
    queue = list(range(len(corners)))
    while queue:
        i = queue.pop()
        if not alive[i]:
            continue
        over = alive & overlapping(corners, Box(*map(int, corners[i])))
        # Every box overlaps itself. The hull may overlap further boxes, so put it into the queue again.
        if over.sum() > 1:
            # A row of corners is y0, y1, x0, x1: of the hull, the least y0 and x0, and the largest y1 and x1.
            low, high = corners[over].min(axis=0), corners[over].max(axis=0)
            corners[i] = low[0], high[1], low[2], high[3]
            alive &= ~over
            alive[i] = True
            queue.append(i)
    return [Box(*map(int, row)) for row in corners[alive]]


def cut(box: Box, occupied: NDArray[np.bool_], side: int) -> Iterator[Box]:
    """Cut a box into squares of ``side`` blocks; yield each square that has tissue, shrunk to its occupied blocks."""
    for y in range(box.y0, box.y1, side):
        for x in range(box.x0, box.x1, side):
            square = Box(y, min(y + side, box.y1), x, min(x + side, box.x1))
            shrunk = shrink(square, occupied)
            if not shrunk.empty:
                yield shrunk


def shrink(box: Box, occupied: NDArray[np.bool_]) -> Box:
    """Return the smallest box around the occupied blocks in ``box``; an empty box if there are none."""
    inside = occupied[box.slices()]
    rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
    if not len(rows):
        return Box(box.y0, box.y0, box.x0, box.x0)
    return Box(
        box.y0 + int(rows[0]), box.y0 + int(rows[-1]) + 1, box.x0 + int(columns[0]), box.x0 + int(columns[-1]) + 1
    )


def place_all(boxes: Sequence[Box], size_px: tuple[int, int], align: int) -> list[tuple[Box, tuple[int, int]]] | None:
    """Place all boxes in an image; return [(box, (y, x) in the image)], tall boxes first; None if not all fit."""
    if sum(box.area for box in boxes) > size_px[0] * size_px[1]:
        return None
    shelves = Shelves(*size_px, align)
    placed = []
    # A shelf is as tall as its first piece, so tall pieces first waste the least room.
    for box in sorted(boxes, key=_tall_first):
        corner = shelves.place(box.height, box.width)
        if corner is None:
            return None
        placed.append((box, corner))
    return placed


def place_most(
    boxes: Sequence[Box], tissue_px: Sequence[int], size_px: tuple[int, int], align: int
) -> list[tuple[Box, tuple[int, int]]]:
    """Place as many boxes in an image as fit; return [(box, (y, x) in the image)].

    First the n boxes with the most tissue, for the largest n whose boxes fit together (by bisection); then any other
    boxes that fit beside these.
    """
    ranked = [box for _, box in sorted(zip(tissue_px, boxes, strict=True), key=lambda item: (-item[0], item[1]))]
    # Packing is not monotone, so bisection may find a smaller n, but one that has been packed.
    fits, fails = 0, len(ranked) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if place_all(ranked[:middle], size_px, align) is None:
            fails = middle
        else:
            fits = middle
    shelves = Shelves(*size_px, align)
    in_order = sorted(ranked[:fits], key=_tall_first) + ranked[fits:]
    places = [(box, shelves.place(box.height, box.width)) for box in in_order]
    return [(box, corner) for box, corner in places if corner is not None]


def _tall_first(box: Box) -> tuple[int, int, Box]:
    return -box.height, -box.width, box
