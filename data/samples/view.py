"""One training image of fixed size from a slide: which rectangles of the slide it shows, and where.

Pieces are moved, never scaled: source and target have the same shape, and both begin at multiples of ``align_px``. So
a cell of a network's feature map (stride dividing ``align_px``) that lies in a piece shows one square of the slide, and
a map over the image can be laid back over the slide. Only a piece at the slide's own lower or right border, or at the
image's, ends off the grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.samples.pack import components, cut, place_all, place_most, shrink
from data.store.tissue_grid import TissueGrid
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box, hull

Kind = Literal["pack", "crop"]
BACKGROUND = 255
SMALLEST_CUT_PX = 256
"""Smallest size of pieces: about that of structures a pathologist examines (a gland and its surroundings)."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of the slide and its place in the image: same shape, one pixel for one.

    Attributes:
        source: pixels of the slide (of the store level that the view was made for).
        target: pixels of the training image.
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
        """(dy, dx) from target to source."""
        return self.source.y0 - self.target.y0, self.source.x0 - self.target.x0


@dataclass(frozen=True)
class View:
    """The composition of a training image. Pieces overlap neither in the slide nor in the image.

    Attributes:
        size_px: (height, width) of the image; white (255) outside of pieces.
        pieces: sorted by their place in the image.
        coverage: tissue pixels in pieces / tissue pixels; 0.0 without tissue.
        tissue_px: tissue pixels of the slide.
        flags: ``no_tissue``, ``cropped`` (some tissue is left out).
    """

    size_px: tuple[int, int]
    pieces: tuple[Piece, ...]
    coverage: float
    tissue_px: int
    flags: tuple[str, ...]

    @property
    def box(self) -> Box:
        """The whole image."""
        return Box.of_size(*self.size_px)

    def to_slide(self, box: Box) -> tuple[Piece, ...]:
        """Return what of ``box`` (image pixels) shows the slide: pieces of pieces, the rest of it is background."""
        return tuple(
            Piece(shown.shift(*self.pieces[i].offset), shown)
            for i in self._over(self._targets, box)
            if not (shown := self.pieces[i].target.intersect(box)).empty
        )

    @cached_property
    def _targets(self) -> NDArray[np.int64]:
        return _ends([piece.target for piece in self.pieces])

    @staticmethod
    def _over(ends: NDArray[np.int64], box: Box) -> list[int]:
        over = (ends[:, 0] < box.y1) & (box.y0 < ends[:, 1]) & (ends[:, 2] < box.x1) & (box.x0 < ends[:, 3])
        found: list[int] = np.flatnonzero(over).tolist()
        return found


def make_view(tissue: TissueGrid, size_px: tuple[int, int], kind: Kind = "pack", align_px: int = 64) -> View:
    """Choose the parts of a slide that the training image shows. Deterministic.

    ``pack``: the tissue as it lies, where its hull fits; else its pieces moved together, cut into ever smaller squares
    (down to 256 px) until all fit; else those with most tissue. ``crop``: the window with most tissue.

    Args:
        tissue: the mask, laid under the slide in pixels of the training image.
        size_px: (height, width) of the training image.
        kind: ``pack`` or ``crop``.
        align_px: grid on which pieces begin; a multiple of the network's stride.

    Raises:
        RequestError: an unknown kind, or an image smaller than one block of the grid.
    """
    if kind not in ("pack", "crop"):
        raise RequestError(f"data.view: given {kind!r}; allowed: pack, crop")
    if align_px < 1 or min(size_px) < align_px:
        raise RequestError(
            f"data.size_px: given {size_px[0]} × {size_px[1]}; height and width of at least align_px = {align_px}"
        )
    tissue_px = tissue.total_px()
    if tissue_px == 0:
        return View(size_px, (), 0.0, 0, ("no_tissue",))
    pieces, kept_px = (_crop if kind == "crop" else _pack)(tissue, size_px, align_px)
    return View(size_px, pieces, kept_px / tissue_px, tissue_px, () if kept_px == tissue_px else ("cropped",))


def make_views(
    tissue: TissueGrid, size_px: tuple[int, int], kind: Kind = "pack", align_px: int = 64
) -> tuple[View, ...]:
    """Choose as many images of one size as it takes to show all tissue of a slide; pieces of no two overlap.

    One image, that of :func:`make_view`, where it holds all tissue. Else ``pack`` cuts the tissue into squares as large
    as the image allows and fills one image after the other, ``crop`` lays windows side by side over the tissue.

    Args:
        tissue: as all arguments, see :func:`make_view`.
        size_px: (height, width) of each image.
        kind: ``pack`` or ``crop``.
        align_px: grid on which pieces begin.

    Returns:
        The images. Each one's ``coverage`` is its own share of the tissue; together they have all of it.

    Raises:
        RequestError: as :func:`make_view`.
    """
    first = make_view(tissue, size_px, kind, align_px)
    if "cropped" not in first.flags:
        return (first,)
    ends = [np.append(np.arange(0, length, align_px, dtype=np.int64), length) for length in tissue.size_px]
    counts = tissue.counts(*ends)
    left = {
        _pixels(block, *ends): int(counts[block.slices()].sum()) for block in _cuts(counts > 0, size_px, align_px, kind)
    }
    views = []
    while left:
        boxes = list(left)[:1] if kind == "crop" else list(left)
        placed = place_most(boxes, [left[box] for box in boxes], size_px, align_px)
        shown_px = sum(left.pop(box) for box, _ in placed)
        views.append(
            View(size_px, _centred(placed, size_px, align_px), shown_px / first.tissue_px, first.tissue_px, ())
        )
    return tuple(views)


def _cuts(occupied: NDArray[np.bool_], size_px: tuple[int, int], align: int, kind: Kind) -> list[Box]:
    """Return rectangles of blocks that cover the tissue, each of which fits into an image."""
    if kind == "pack":
        side = min(size_px) // align
        return [square for box in components(occupied) for square in cut(box, occupied, side)]
    whole = shrink(Box.of_size(*occupied.shape), occupied)
    height, width = size_px[0] // align, size_px[1] // align
    windows = [
        Box(y, min(y + height, whole.y1), x, min(x + width, whole.x1))
        for y in range(whole.y0, whole.y1, height)
        for x in range(whole.x0, whole.x1, width)
    ]
    return [window for window in windows if occupied[window.slices()].any()]


def _pack(grid: TissueGrid, size_px: tuple[int, int], align: int) -> tuple[tuple[Piece, ...], int]:
    """Return the pieces and how many tissue pixels they hold."""
    ends = [np.append(np.arange(0, length, align, dtype=np.int64), length) for length in grid.size_px]
    tissue = grid.counts(*ends)
    hopeless = int(tissue.sum()) > size_px[0] * size_px[1]
    for blocks in _attempts(tissue > 0, _sides(size_px, align)[-1:] if hopeless else _sides(size_px, align)):
        boxes = [_pixels(box, *ends) for box in blocks]
        placed = place_all(boxes, size_px, align)
        if placed is not None:
            return _centred(placed, size_px, align), int(tissue.sum())
    tissue_of = {box: int(tissue[block.slices()].sum()) for box, block in zip(boxes, blocks, strict=True)}
    placed = place_most(list(tissue_of), list(tissue_of.values()), size_px, align)
    return _centred(placed, size_px, align), sum(tissue_of[box] for box, _ in placed)


def _attempts(occupied: NDArray[np.bool_], sides: Sequence[int]) -> Iterator[list[Box]]:
    """Yield rectangles of blocks that cover the tissue: its hull, its pieces, these cut smaller and smaller."""
    yield [shrink(Box.of_size(*occupied.shape), occupied)]
    boxes = components(occupied)
    yield boxes
    for side in sides:
        yield [square for box in boxes for square in cut(box, occupied, side)]


def _sides(size_px: tuple[int, int], align: int) -> list[int]:
    """Return the sides, in blocks, of the squares to try, falling: the largest that fits, halves of it, 256 px last."""
    side = min(size_px) // align
    smallest = min(side, max(1, SMALLEST_CUT_PX // align))
    sides = []
    while side > smallest:
        sides.append(side)
        side //= 2
    return [*sides, smallest]


def _crop(grid: TissueGrid, size_px: tuple[int, int], align: int) -> tuple[tuple[Piece, ...], int]:
    """Return the window with most tissue, and how much it has; among equals the one nearest to their middle."""
    starts = [_starts(length, size, align) for length, size in zip(grid.size_px, size_px, strict=True)]
    ends = [np.minimum(s + size, length) for s, size, length in zip(starts, size_px, grid.size_px, strict=True)]
    cuts = [np.unique(np.concatenate([[0], s, e])) for s, e in zip(starts, ends, strict=True)]
    until = np.zeros((len(cuts[0]), len(cuts[1])), np.int64)
    until[1:, 1:] = grid.counts(cuts[0], cuts[1]).cumsum(axis=0).cumsum(axis=1)
    y0, x0 = (np.searchsorted(c, s) for c, s in zip(cuts, starts, strict=True))
    y1, x1 = (np.searchsorted(c, e) for c, e in zip(cuts, ends, strict=True))
    tissue = until[np.ix_(y1, x1)] - until[np.ix_(y0, x1)] - until[np.ix_(y1, x0)] + until[np.ix_(y0, x0)]
    best = np.argwhere(tissue == tissue.max())
    row, column = best[np.argmin((np.abs(best * 2 - best.min(axis=0) - best.max(axis=0))).sum(axis=1))]
    window = Box(int(starts[0][row]), int(ends[0][row]), int(starts[1][column]), int(ends[1][column]))
    return _centred([(window, (0, 0))], size_px, align), int(tissue.max())


def _starts(length: int, size: int, align: int) -> NDArray[np.int64]:
    """Return where a window may begin: on the grid, the last one reaching the slide's end."""
    last = -(-max(0, length - size) // align)
    return np.arange(last + 1, dtype=np.int64) * align


def _centred(placed: Sequence[tuple[Box, tuple[int, int]]], size_px: tuple[int, int], align: int) -> tuple[Piece, ...]:
    """Return the pieces, all moved by the same whole blocks so that the white border is alike on both sides."""
    targets = [source.relative_to(source).shift(*place) for source, place in placed]
    used = hull(targets)
    dy, dx = (size_px[0] - used.y1) // 2 // align * align, (size_px[1] - used.x1) // 2 // align * align
    pieces = [Piece(source, target.shift(dy, dx)) for (source, _), target in zip(placed, targets, strict=True)]
    return _joined(sorted(pieces, key=lambda piece: (piece.target.y0, piece.target.x0)))


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Make one piece of neighbours in a row that are neighbours in the slide too: fewer, longer reads."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else piece
        rows = (piece.target.y0, piece.target.y1)
        if (
            last.target.x1 == piece.target.x0
            and (last.target.y0, last.target.y1) == rows
            and last.offset == piece.offset
        ):
            joined[-1] = Piece(last.source.hull(piece.source), last.target.hull(piece.target))
        else:
            joined.append(piece)
    return tuple(joined)


def _pixels(box: Box, y_ends: NDArray[np.int64], x_ends: NDArray[np.int64]) -> Box:
    return Box(int(y_ends[box.y0]), int(y_ends[box.y1]), int(x_ends[box.x0]), int(x_ends[box.x1]))


def _ends(boxes: Sequence[Box]) -> NDArray[np.int64]:
    return np.array([[b.y0, b.y1, b.x0, b.x1] for b in boxes], dtype=np.int64).reshape(-1, 4)
