"""Views: which rectangles of a slide a training image of fixed size shows, and where.

Pieces are moved, never scaled: source and target have the same shape, and both start at multiples of ``align_px``. So
if the stride of a network divides ``align_px``, each position of its feature map inside a piece corresponds to one
square of the slide, and a map over the image can be drawn over the slide. Pieces end on the grid, too, except at the
lower or right border of the slide or of the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.samples.pack import components, corners_of, cut, overlapping, place_all, place_most, shrink
from data.store.tissue_grid import TissueGrid
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box, hull

ViewKind = Literal["pack", "crop"]
BACKGROUND = 255
SMALLEST_CUT_PX = 256
"""Smallest side of the squares into which tissue is cut: about the size of a gland and its surroundings."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of the slide and its place in the image, of the same shape.

    Attributes:
        source: Box of the slide, in pixels of the store level that the view was made for.
        target: Box of the training image.
    """

    source: Box
    target: Box

    def __post_init__(self) -> None:
        if self.source.shape != self.target.shape or self.source.empty:
            raise ValueError(
                f"a piece must have the same size in slide and image, and must not be empty: "
                f"{self.source} to {self.target}"
            )

    @property
    def offset(self) -> tuple[int, int]:
        """(dy, dx) from ``target`` to ``source``: slide position = image position + offset."""
        return self.source.y0 - self.target.y0, self.source.x0 - self.target.x0


@dataclass(frozen=True)
class View:
    """The composition of a training image. Pieces overlap neither in the slide nor in the image.

    Attributes:
        size_px: (height, width) of the image; white (255) outside the pieces.
        pieces: Sorted by their place in the image.
        coverage: Tissue pixels in the pieces / tissue pixels of the slide; 0.0 without tissue.
        tissue_px: Tissue pixels of the slide.
        flags: ``no_tissue``, ``cropped`` (some tissue is left out).
    """

    size_px: tuple[int, int]
    pieces: tuple[Piece, ...]
    coverage: float
    tissue_px: int
    flags: tuple[str, ...]

    @property
    def box(self) -> Box:
        """The box of the whole image."""
        return Box.of_size(*self.size_px)

    def to_slide(self, box: Box) -> tuple[Piece, ...]:
        """Return the pieces, clipped to ``box`` (image pixels); the rest of ``box`` is background."""
        return tuple(
            Piece(shown.shift(*self.pieces[i].offset), shown)
            for i in np.flatnonzero(overlapping(self._targets, box)).tolist()
            if not (shown := self.pieces[i].target.intersect(box)).empty
        )

    @cached_property
    def _targets(self) -> NDArray[np.int64]:
        return corners_of([piece.target for piece in self.pieces])


def make_view(tissue: TissueGrid, size_px: tuple[int, int], kind: ViewKind = "pack", align_px: int = 64) -> View:
    """Choose the parts of a slide that the training image shows. Deterministic.

    ``pack`` shows the tissue in place if its bounding box fits into the image. Otherwise the connected pieces of tissue
    are packed, cut into smaller and smaller squares (down to 256 px) until all fit. If they still do not, those with
    most tissue are shown. ``crop`` shows the window with most tissue.

    Args:
        tissue: The tissue mask, aligned with the slide at the mpp of the training image.
        size_px: (height, width) of the training image.
        kind: ``pack`` or ``crop``.
        align_px: Grid on which pieces start; a multiple of the network's stride.

    Raises:
        RequestError: The kind is unknown, or the image is smaller than one block of the grid.
    """
    if kind not in ("pack", "crop"):
        raise RequestError(f"data.view: given {kind!r}; allowed: pack, crop")
    if align_px < 1 or min(size_px) < align_px:
        raise RequestError(
            f"data.size_px: given {size_px[0]} × {size_px[1]}; height and width must be at least align_px = {align_px}"
        )
    tissue_px = tissue.total_px()
    if tissue_px == 0:
        return View(size_px, (), 0.0, 0, ("no_tissue",))
    pieces, kept_px = (_crop if kind == "crop" else _pack)(tissue, size_px, align_px)
    return View(size_px, pieces, kept_px / tissue_px, tissue_px, () if kept_px == tissue_px else ("cropped",))


def make_views(
    tissue: TissueGrid, size_px: tuple[int, int], kind: ViewKind = "pack", align_px: int = 64
) -> tuple[View, ...]:
    """Choose several images of one size that together show all tissue of a slide, each part of it once.

    If the image of :func:`make_view` shows all tissue, it is the only one. Otherwise ``pack`` cuts the tissue into
    squares as large as the image allows and fills one image after the other; ``crop`` tiles the tissue with windows.

    Args:
        tissue: The tissue mask, aligned with the slide at the mpp of the images.
        size_px: (height, width) of each image.
        kind: ``pack`` or ``crop``.
        align_px: Grid on which pieces start.

    Returns:
        The images. The ``coverage`` of each is the fraction of the tissue that it shows; they add up to 1.

    Raises:
        RequestError: As :func:`make_view`.
    """
    first = make_view(tissue, size_px, kind, align_px)
    if "cropped" not in first.flags:
        return (first,)
    ends = _block_ends(tissue, align_px)
    counts = tissue.counts(*ends)
    blocks = _cuts(counts > 0, size_px, align_px, kind)
    # Boxes (pixels) that no image shows yet -> their tissue pixels.
    unshown = {_pixels(block, *ends): int(counts[block.slices()].sum()) for block in blocks}
    views = []
    while unshown:
        # Windows of a crop are as large as the image: one for each image.
        boxes = list(unshown)[:1] if kind == "crop" else list(unshown)
        placed = place_most(boxes, [unshown[box] for box in boxes], size_px, align_px)
        # The loop ends: each box fits into an empty image, so at least one is placed.
        shown_px = sum(unshown.pop(box) for box, _ in placed)
        views.append(
            View(size_px, _centred(placed, size_px, align_px), shown_px / first.tissue_px, first.tissue_px, ())
        )
    return tuple(views)


def _cuts(occupied: NDArray[np.bool_], size_px: tuple[int, int], align: int, kind: ViewKind) -> list[Box]:
    """Return boxes, in blocks of ``align`` pixels, that cover the tissue; each fits into an image of ``size_px``.

    For ``pack``, boxes around parts of the tissue; for ``crop``, windows of the size of an image, in rows.
    """
    if kind == "pack":
        side = min(size_px) // align
        return [square for box in components(occupied) for square in cut(box, occupied, side)]
    extent = shrink(Box.of_size(*occupied.shape), occupied)
    height, width = size_px[0] // align, size_px[1] // align
    windows = [
        Box(y, min(y + height, extent.y1), x, min(x + width, extent.x1))
        for y in range(extent.y0, extent.y1, height)
        for x in range(extent.x0, extent.x1, width)
    ]
    return [window for window in windows if occupied[window.slices()].any()]


def _pack(grid: TissueGrid, size_px: tuple[int, int], align: int) -> tuple[tuple[Piece, ...], int]:
    """Return the pieces of a ``pack`` view, and the number of tissue pixels in them."""
    ends = _block_ends(grid, align)
    tissue = grid.counts(*ends)
    sides = _sides(size_px, align)
    if int(tissue.sum()) > size_px[0] * size_px[1]:
        sides = sides[-1:]  # not all tissue can fit: only the smallest squares are needed, to choose from
    # From coarse to fine: one box, components, squares of each side. The first that fits cuts the tissue least.
    for block_boxes in _coverings(tissue > 0, sides):
        boxes = [_pixels(box, *ends) for box in block_boxes]
        placed = place_all(boxes, size_px, align)
        if placed is not None:
            return _centred(placed, size_px, align), int(tissue.sum())
    # None fits: place as many boxes of the finest covering as fit.
    tissue_of = {box: int(tissue[block.slices()].sum()) for box, block in zip(boxes, block_boxes, strict=True)}
    placed = place_most(list(tissue_of), list(tissue_of.values()), size_px, align)
    return _centred(placed, size_px, align), sum(tissue_of[box] for box, _ in placed)


def _block_ends(grid: TissueGrid, align: int) -> list[NDArray[np.int64]]:
    """Return the ends of blocks of the alignment grid, [rows, columns]: ``[0, 64, 128, 150]`` for 150 rows."""
    return [np.append(np.arange(0, length, align, dtype=np.int64), length) for length in grid.size_px]


def _coverings(occupied: NDArray[np.bool_], sides: Sequence[int]) -> Iterator[list[Box]]:
    """Yield coverings of the tissue by boxes of blocks: one box, its components, these cut into smaller squares."""
    yield [shrink(Box.of_size(*occupied.shape), occupied)]
    boxes = components(occupied)
    yield boxes
    for side in sides:
        yield [square for box in boxes for square in cut(box, occupied, side)]


def _sides(size_px: tuple[int, int], align: int) -> list[int]:
    """Return the sides (in blocks) of the squares to try: the largest that fits, halved down to 256 px."""
    side = min(size_px) // align
    smallest = min(side, max(1, SMALLEST_CUT_PX // align))
    sides = []
    while side > smallest:
        sides.append(side)
        side //= 2
    return [*sides, smallest]


def _crop(grid: TissueGrid, size_px: tuple[int, int], align: int) -> tuple[tuple[Piece, ...], int]:
    """Return (the window with most tissue as a piece, its tissue pixels); of equal windows the one in the middle.

    Counts all windows at once with a summed-area table over the rows and columns where windows start or end.
    """
    # Windows start at multiples of `align`; the slide's border cuts the last ones, so ends are computed for each.
    starts = [_starts(length, size, align) for length, size in zip(grid.size_px, size_px, strict=True)]
    ends = [np.minimum(s + size, length) for s, size, length in zip(starts, size_px, grid.size_px, strict=True)]
    cuts = [np.unique(np.concatenate([[0], s, e])) for s, e in zip(starts, ends, strict=True)]
    summed = np.zeros((len(cuts[0]), len(cuts[1])), np.int64)
    # A row and a column of zeros in front, so that windows at 0 need no special case.
    summed[1:, 1:] = grid.counts(cuts[0], cuts[1]).cumsum(axis=0).cumsum(axis=1)
    y0, x0 = (np.searchsorted(c, s) for c, s in zip(cuts, starts, strict=True))
    y1, x1 = (np.searchsorted(c, e) for c, e in zip(cuts, ends, strict=True))
    tissue = summed[np.ix_(y1, x1)] - summed[np.ix_(y0, x1)] - summed[np.ix_(y1, x0)] + summed[np.ix_(y0, x0)]
    best = np.argwhere(tissue == tissue.max())
    # Of (row, column) to the middle of the best windows, (min + max) / 2; doubled, so that all numbers are whole.
    twice_distances = np.abs(best * 2 - best.min(axis=0) - best.max(axis=0)).sum(axis=1)
    row, column = best[np.argmin(twice_distances)]
    window = Box(int(starts[0][row]), int(ends[0][row]), int(starts[1][column]), int(ends[1][column]))
    return _centred([(window, (0, 0))], size_px, align), int(tissue.max())


def _starts(length: int, size: int, align: int) -> NDArray[np.int64]:
    """Return where windows may start: on the grid, the last one reaching the slide's border."""
    # Rounded up: the last window reaches the border, or beyond it.
    last = -(-max(0, length - size) // align)
    return np.arange(last + 1, dtype=np.int64) * align


def _centred(placed: Sequence[tuple[Box, tuple[int, int]]], size_px: tuple[int, int], align: int) -> tuple[Piece, ...]:
    """Return placed boxes as pieces, all shifted by the same number of blocks to the middle of the image."""
    targets = [source.relative_to(source).shift(*corner) for source, corner in placed]
    used = hull(targets)
    # Whole blocks: targets stay on the grid.
    dy, dx = (size_px[0] - used.y1) // 2 // align * align, (size_px[1] - used.x1) // 2 // align * align
    pieces = [Piece(source, target.shift(dy, dx)) for (source, _), target in zip(placed, targets, strict=True)]
    return _merged(sorted(pieces, key=lambda piece: (piece.target.y0, piece.target.x0)))


def _merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge pieces that are side by side in both image and slide, for fewer and longer reads."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else piece
        rows = (piece.target.y0, piece.target.y1)
        if (
            last.target.x1 == piece.target.x0
            and (last.target.y0, last.target.y1) == rows
            and last.offset == piece.offset
        ):
            merged[-1] = Piece(last.source.hull(piece.source), last.target.hull(piece.target))
        else:
            merged.append(piece)
    return tuple(merged)


def _pixels(box: Box, y_ends: NDArray[np.int64], x_ends: NDArray[np.int64]) -> Box:
    """Return the box in pixels of a box of blocks; the arrays are those of `_block_ends`."""
    return Box(int(y_ends[box.y0]), int(y_ends[box.y1]), int(x_ends[box.x0]), int(x_ends[box.x1]))
