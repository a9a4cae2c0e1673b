"""Blocks of a slide that are covered one after the other; their size depends on the largest number of forwards.

Blocks are squares on the slide's grid. To cover a block is to cover all boxes of images that show a part of it:

    slide                         image (view)
    +-----+-----+-----+           +--+-----+
    |     | AAAA|     |           |AA|BBBBB|     the block of the second column covers these boxes
    |     | AA  |BB   |  ------>  |AA|     |     of the image; a block without tissue is not covered
    +-----+-----+-----+           +--+-----+
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.arrays import Mask
from data.samples.view import View
from data.store.tissue_grid import TissueGrid
from hyfi_core.plan.box import Box

_MOST_SIDES = 4096
"""Most rows and columns of the grid on which tissue is counted."""


@dataclass(frozen=True)
class CoveredBlock:
    """A block with tissue that an image shows.

    Attributes:
        row, column: Position of the block on the slide's grid of blocks.
        image: Index of the image.
        boxes: Boxes of the image that show the block.
    """

    row: int
    column: int
    image: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class OcclusionBlocks:
    """The blocks of a slide.

    Attributes:
        block_px: Side of a block in pixels of the slide at the model's resolution.
        shape: (rows, columns) of the grid of blocks.
        covered: Each block with tissue, once for each image that shows it, sorted by image; each needs one forward.
    """

    block_px: int
    shape: tuple[int, int]
    covered: tuple[CoveredBlock, ...]

    @classmethod
    def of(cls, tissue: TissueGrid, views: Sequence[View], align_px: int, most: int) -> OcclusionBlocks:
        """Return the smallest blocks that need at most ``most`` forwards; at worst one block as large as the slide.

        Sides of blocks are multiples of ``align_px``, so that blocks end at ends of the heatmap's squares.

        Args:
            tissue: Tissue of the slide at the model's resolution.
            views: The images of the slide.
            align_px: Alignment of the views' pieces.
            most: Largest number of forwards.
        """
        size = tissue.size_px
        # Side of a square: a multiple of ``align_px`` with which the grid of squares is at most 4096 × 4096.
        square_px = align_px * math.ceil(max(size) / align_px / _MOST_SIDES)
        masks = _shown_tissue(tissue, views, square_px)  # of each image
        square_count = sum(int(mask.sum()) for mask in masks)
        # A block has side × side squares, and each block of an image is one forward. Begin at a lower bound of the
        # side: n squares are in at least n / side² blocks.
        side = max(1, math.isqrt(max(0, square_count - 1) // most))
        while sum(int(_blocks_with_any(mask, side).sum()) for mask in masks) > most and side * square_px < max(size):
            # Add a sixteenth, but at least 1: by adding 1 only, a slide may need hundreds of rounds.
            side += max(1, side // 16)
        block_px = side * square_px
        covered = [
            CoveredBlock(row, column, image, _boxes_of(view, row, column, block_px))
            for image, (view, mask) in enumerate(zip(views, masks, strict=True))
            for row, column in np.argwhere(_blocks_with_any(mask, side)).tolist()
        ]
        return cls(block_px, (math.ceil(size[0] / block_px), math.ceil(size[1] / block_px)), tuple(covered))


def _shown_tissue(tissue: TissueGrid, views: Sequence[View], square_px: int) -> list[Mask]:
    """Return, for each image, a mask of the slide's squares of ``square_px``: with tissue that the image shows."""
    ends = [np.append(np.arange(0, length, square_px), length) for length in tissue.size_px]
    has_tissue = tissue.counts(ends[0], ends[1]) > 0
    shown = []
    for view in views:
        squares = np.zeros_like(has_tissue)
        for piece in view.pieces:
            box = piece.source
            rows = slice(box.y0 // square_px, math.ceil(box.y1 / square_px))
            columns = slice(box.x0 // square_px, math.ceil(box.x1 / square_px))
            squares[rows, columns] = True
        shown.append(squares & has_tissue)
    return shown


def _blocks_with_any(squares: Mask, side: int) -> Mask:
    """Return a mask of blocks of ``side`` × ``side`` squares: those in which any square is set."""
    rows, columns = (math.ceil(length / side) for length in squares.shape)
    padded = np.zeros((rows * side, columns * side), bool)
    padded[: squares.shape[0], : squares.shape[1]] = squares
    return np.asarray(padded.reshape(rows, side, columns, side).any(axis=(1, 3)))


def _boxes_of(view: View, row: int, column: int, block_px: int) -> tuple[Box, ...]:
    """Return the boxes of the image that show a block of the slide."""
    block = Box(row * block_px, (row + 1) * block_px, column * block_px, (column + 1) * block_px)
    boxes = []
    for piece in view.pieces:
        part = piece.source.intersect(block)
        if not part.empty:
            dy, dx = piece.offset
            # `offset` is from the image to the slide.
            boxes.append(part.shift(-dy, -dx))
    return tuple(boxes)
