"""Heatmaps: contributions and scores of the squares of a model's last map, mapped back to the slide.

The model's input is an image composed of pieces of the slide; its last map has one square for every ``square_px``
pixels of that image. The heatmap has the same squares on the slide's grid:

    training image (view)             slide (heatmap)
    +----+--+                         . . . . . . .        .  NaN: the model did not look
    |AAAA|BB|    contributions        . A A . . . .
    |AAAA|BB|   ---------------->     . A A . B . .        sum(A) + sum(B) + sum(background) + bias == logit
    +----+--+   source <- target      . . . . B . .
    |    background                   . . . . . . .

Sources and targets of pieces begin at multiples of the view's ``align_px``. If this is a multiple of a square's side,
squares map one to one; otherwise every square is placed by its centre, and ``one_to_one`` is False.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from data.samples.view import Piece, View

SMOOTH_SQUARES = 1.0
"""Scores are smoothed by a Gaussian of this many squares: about the overlap of their receptive fields."""


@dataclass(frozen=True, eq=False)
class Heatmap:
    """Scores and contributions on the slide's grid of squares.

    Attributes:
        scores: (classes, rows, columns) float32: output of the head at each position before pooling, smoothed, 0 to 1;
            scores of exclusive classes sum to 1; NaN where not seen.
        values: (classes, rows, columns) float32: contributions to the logits; NaN where not seen. Square (i, j) covers
            ``[i * square_px, (i + 1) * square_px) x [j * square_px, (j + 1) * square_px)`` of the slide at the model's
            resolution; the last row and column may extend beyond the slide.
        square_px: side of a square in pixels of the slide at the model's resolution.
        mpp: (y, x) micrometres per pixel of the slide at the model's resolution.
        slide_size_px: (height, width) of the slide at the model's resolution.
        class_names: names of the channels.
        logits: one for each class.
        bias: for each class, ``logit - sum of the contributions``: the bias of a linear head.
        shared: for each class, the part of the background's contribution that was added to each seen square of
            ``values``.
        one_to_one: whether squares were mapped one to one; otherwise by their centres.
        exclusive: whether scores of a position sum to 1 over classes.
        of_tiles: whether squares are tiles or parts of tiles; a score is then that of a slide with only this tile.
        mapped: whether the model has a map whose positions contribute; if not, scores are NaN and contributions 0.
        attention: (rows, columns) float32: weights of tiles in the aggregator, relative to the average tile; NaN where
            not seen; None if there are none.
    """

    scores: NDArray[np.float32]
    values: NDArray[np.float32]
    square_px: int
    mpp: tuple[float, float]
    slide_size_px: tuple[int, int]
    class_names: tuple[str, ...]
    logits: tuple[float, ...]
    bias: tuple[float, ...]
    shared: tuple[float, ...]
    one_to_one: bool
    exclusive: bool = True
    of_tiles: bool = False
    mapped: bool = True
    attention: NDArray[np.float32] | None = None

    @property
    def square_um(self) -> tuple[float, float]:
        """Micrometres per square as (y, x)."""
        return self.mpp[0] * self.square_px, self.mpp[1] * self.square_px

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of its slide, which say what the heatmap is not."""
        if not self.mapped:
            return ("no_heatmap",)
        return () if self.one_to_one else ("heatmap_by_centre",)

    def positive_contributions(self, class_index: int) -> NDArray[np.float64]:
        """Return each square's contribution to a class's logit if it is positive, else 0; (rows, columns).

        The part of the background (``shared``), equal in all squares, is not included.
        """
        own = self.values[class_index].astype(np.float64) - self.shared[class_index]
        positive: NDArray[np.float64] = np.maximum(np.nan_to_num(own), 0.0)
        return positive

    @property
    def certainty(self) -> NDArray[np.float64]:
        """(rows, columns): the highest score, rescaled so that a tie of exclusive classes is 0; 0 where not seen."""
        tie = 1 / len(self.class_names) if self.exclusive else 0.0
        above: NDArray[np.float64] = (np.nan_to_num(self.scores.max(axis=0), nan=tie) - tie) / (1 - tie)
        return above.clip(0.0, 1.0)

    @property
    def color_weights(self) -> NDArray[np.float32]:
        """(classes, rows, columns): the part of each class's colour in the colour of a square; 0 where not seen.

        Parts of a square sum to 1, also for classes that are not exclusive: their colour shows which classes have high
        scores, and ``certainty`` shows how high these are.
        """
        weights: NDArray[np.float32] = np.nan_to_num(self.scores)
        if not self.exclusive:
            total = weights.sum(axis=0)
            np.divide(weights, total, out=weights, where=total > 0)
        return weights

    @property
    def seen_squares(self) -> NDArray[np.bool_]:
        """(rows, columns): the squares that the model has seen."""
        finite: NDArray[np.bool_] = ~np.isnan(self.values[0])
        return finite


def place(
    contributions: Sequence[NDArray[np.floating]],
    scores: Sequence[NDArray[np.floating]],
    logits: Sequence[float],
    views: Sequence[View],
    *,
    align_px: int,
    slide_size_px: tuple[int, int],
    mpp: tuple[float, float],
    class_names: Sequence[str],
) -> Heatmap:
    """Map a model's contributions to the slide.

    The contribution of the background (squares outside of all pieces) is divided equally among the seen squares.

    Args:
        contributions: for each image, (classes, h, w); the sum over (h, w) and all images + bias = logit.
        scores: for each image, (classes, h, w), 0 to 1.
        logits: one for each class.
        views: the composition of each image; all of one size.
        align_px: alignment of the view's pieces.
        slide_size_px: (height, width) of the slide at the model's resolution.
        mpp: (y, x) micrometres per pixel of the slide at the model's resolution.
        class_names: one for each class.

    Returns:
        The heatmap, in new memory: ``8 * classes * slide pixels / square_px**2`` bytes.

    Raises:
        ValueError: the views have no piece.
    """
    if not (pieces := [piece for view in views for piece in view.pieces]):
        raise ValueError("the views have no piece of the slide")
    square_px, one_to_one = _squares_of(views[0].size_px, contributions[0].shape[1:], pieces, align_px)
    shape = (math.ceil(slide_size_px[0] / square_px), math.ceil(slide_size_px[1] / square_px))
    classes = len(logits)
    canvas = np.zeros((2 * classes + 1, *shape))  # contributions, scores, number of squares
    is_seen = np.zeros(shape, dtype=bool)
    totals, background = np.zeros(classes), np.zeros(classes)
    for contribution, score, view in zip(contributions, scores, views, strict=True):
        values = np.asarray(contribution, dtype=np.float64)
        maps = np.concatenate([values, score, np.ones((1, *values.shape[1:]))])
        used = (_copy_squares if one_to_one else _scatter_centres)(maps, view, square_px, canvas, is_seen)
        totals += values.sum(axis=(1, 2))
        background += np.where(used, 0.0, values).sum(axis=(1, 2))
    shared = background / max(1, int(is_seen.sum()))
    canvas[:classes] += shared[:, None, None]
    canvas[:, ~is_seen] = np.nan
    return Heatmap(
        scores=smoothed(canvas[classes:-1] / canvas[-1]),
        values=canvas[:classes].astype(np.float32),
        square_px=square_px,
        mpp=mpp,
        slide_size_px=slide_size_px,
        class_names=tuple(class_names),
        logits=tuple(map(float, logits)),
        bias=tuple((np.asarray(logits, dtype=np.float64) - totals).tolist()),
        shared=tuple(shared.tolist()),
        one_to_one=one_to_one,
    )


def _squares_of(
    size_px: tuple[int, int], squares: tuple[int, ...], pieces: Sequence[Piece], align_px: int
) -> tuple[int, bool]:
    """Return (side of a square in pixels, whether squares of the model's map and of the slide map one to one)."""
    stride = network_stride(size_px, squares, align_px)
    if stride is not None and all(_aligned(piece, stride) for piece in pieces):
        return stride, True
    return max(1, round(max(size_px[0] / squares[0], size_px[1] / squares[1]))), False


def network_stride(size_px: tuple[int, int], squares: tuple[int, ...], align_px: int) -> int | None:
    """Return the side of a square in pixels: the smallest divisor of ``align_px`` that fits; None if there is none.

    A stride fits if the map has ceil(size / stride) squares along each axis.
    """
    for stride in range(1, align_px + 1):
        if align_px % stride == 0 and all(math.ceil(s / stride) == c for s, c in zip(size_px, squares, strict=True)):
            return stride
    return None


def _aligned(piece: Piece, square_px: int) -> bool:
    """Whether a piece begins at whole squares, on the slide and in the image."""
    corners = (piece.source.y0, piece.source.x0, piece.target.y0, piece.target.x0)
    return all(corner % square_px == 0 for corner in corners)


def _copy_squares(
    maps: NDArray[np.float64], view: View, square_px: int, canvas: NDArray[np.float64], is_seen: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Add every piece's squares to the canvas, one to one; return which squares (h, w) were used."""
    used = np.zeros(maps.shape[1:], dtype=bool)
    for piece in view.pieces:
        rows, columns = (math.ceil(side / square_px) for side in piece.target.shape)
        ty, tx = piece.target.y0 // square_px, piece.target.x0 // square_px
        sy, sx = piece.source.y0 // square_px, piece.source.x0 // square_px
        target = (slice(ty, ty + rows), slice(tx, tx + columns))
        source = (slice(sy, sy + rows), slice(sx, sx + columns))
        canvas[:, *source] += maps[:, *target]
        is_seen[source] = True
        used[target] = True
    return used


def _scatter_centres(
    maps: NDArray[np.float64], view: View, square_px: int, canvas: NDArray[np.float64], is_seen: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Add every square at the position of its centre; return which squares (h, w) were used."""
    rows, columns = maps.shape[1:]
    centre_y = (np.arange(rows) + 0.5) * view.size_px[0] / rows
    centre_x = (np.arange(columns) + 0.5) * view.size_px[1] / columns
    used = np.zeros((rows, columns), dtype=bool)
    for piece in view.pieces:
        in_y = np.flatnonzero((centre_y >= piece.target.y0) & (centre_y < piece.target.y1))
        in_x = np.flatnonzero((centre_x >= piece.target.x0) & (centre_x < piece.target.x1))
        if not in_y.size or not in_x.size:
            continue
        to_y = ((centre_y[in_y] - piece.target.y0 + piece.source.y0) // square_px).astype(int)
        to_x = ((centre_x[in_x] - piece.target.x0 + piece.source.x0) // square_px).astype(int)
        indices = (to_y[:, None] * canvas.shape[2] + to_x).ravel()
        values = maps[:, in_y[:, None], in_x].reshape(len(maps), -1)
        # `np.add.at`: several squares may have the same position; `+=` would count only the last of them.
        np.add.at(canvas.reshape(len(canvas), -1).T, indices, values.T)
        is_seen[np.ix_(to_y, to_x)] = True
        used[np.ix_(in_y, in_x)] = True
    return used


def average(heatmaps: Sequence[Heatmap]) -> Heatmap:
    """Return the mean of an ensemble's heatmaps, on a grid that divides the squares of every member.

    A larger square is divided into smaller squares with equal parts of its contribution, which preserves sums.

    Members without a map contribute only their logits.

    Raises:
        ValueError: the slides differ.
    """
    logits: NDArray[np.float64] = np.mean([heatmap.logits for heatmap in heatmaps], axis=0)
    heatmaps = [heatmap for heatmap in heatmaps if heatmap.mapped] or heatmaps[:1]
    square_px = math.gcd(*(heatmap.square_px for heatmap in heatmaps))
    if len({heatmap.slide_size_px for heatmap in heatmaps}) > 1:
        raise ValueError("heatmaps of different slides cannot be averaged")
    first = heatmaps[0]
    shape = tuple(math.ceil(side / square_px) for side in first.slide_size_px)
    total, scores = np.zeros((len(first.values), *shape)), np.zeros((len(first.values), *shape))
    members = np.zeros(shape)  # number of members with a score for the square
    shared = np.zeros(len(first.values))  # the part of the background's contribution in each square
    is_seen = np.zeros(shape, dtype=bool)
    for heatmap in heatmaps:
        values = _refine(heatmap, square_px, shape)
        # For each small square: a square of this member is divided into (heatmap.square_px / square_px)² small ones.
        shared += np.array(heatmap.shared) * (square_px / heatmap.square_px) ** 2 / len(heatmaps)
        is_seen |= ~np.isnan(values[0])
        total += np.nan_to_num(values)
        score = _repeated(heatmap.scores, heatmap.square_px // square_px, shape)
        scores += np.nan_to_num(score)
        members += ~np.isnan(score[0])
    total /= len(heatmaps)
    scores = np.where(members > 0, scores / np.maximum(members, 1), np.nan)
    total[:, ~is_seen] = np.nan
    return Heatmap(
        scores=scores.astype(np.float32),
        values=total.astype(np.float32),
        square_px=square_px,
        mpp=first.mpp,
        slide_size_px=first.slide_size_px,
        class_names=first.class_names,
        logits=tuple(logits.tolist()),
        bias=tuple(
            (logits - np.mean([np.subtract(heatmap.logits, heatmap.bias) for heatmap in heatmaps], axis=0)).tolist()
        ),
        shared=tuple(shared.tolist()),
        one_to_one=all(heatmap.one_to_one for heatmap in heatmaps),
        exclusive=first.exclusive,
        of_tiles=first.of_tiles,
        mapped=first.mapped,
        attention=_mean_attention(heatmaps, square_px, shape),
    )


def _mean_attention(heatmaps: Sequence[Heatmap], square_px: int, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Return the mean of the attention of all heatmaps, on squares of ``square_px``; None if one has no attention."""
    attentions = [
        (heatmap.attention, heatmap.square_px // square_px) for heatmap in heatmaps if heatmap.attention is not None
    ]
    if len(attentions) < len(heatmaps):
        return None
    stacked = [_repeated(attention[None], times, shape)[0] for attention, times in attentions]
    mean: NDArray[np.float32] = np.mean(stacked, axis=0).astype(np.float32)
    return mean


def _refine(heatmap: Heatmap, square_px: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Divide each square's contribution equally among its squares of ``square_px`` that lie on the slide."""
    times = heatmap.square_px // square_px
    # How many small squares of each large one lie on the slide: fewer at the border, whose parts are then larger.
    sides = [np.bincount(np.arange(n) // times) for n in shape]
    return _repeated(heatmap.values.astype(np.float64) / np.outer(*sides), times, shape)


def _repeated(values: NDArray[np.floating], times: int, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Repeat each square ``times`` in both directions, as far as ``shape``."""
    rows, columns = (np.arange(n) // times for n in shape)
    repeated: NDArray[np.float64] = values[:, rows[:, None], columns].astype(np.float64)
    return repeated


def smoothed(scores: NDArray[np.floating], sigma: float = SMOOTH_SQUARES) -> NDArray[np.float32]:
    """Return maps (classes, rows, columns) smoothed by a Gaussian over the seen squares; NaN stays NaN.

    Weights are normalised at the border of the seen area, which preserves sums over classes.

    Args:
        scores: (classes, rows, columns); NaN in squares that were not seen.
        sigma: standard deviation of the Gaussian, in squares.
    """
    from skimage.filters import gaussian

    is_seen = ~np.isnan(scores[0])
    weight = gaussian(is_seen.astype(np.float64), sigma)  # type: ignore[no-untyped-call]
    filled = np.nan_to_num(scores.astype(np.float64))
    smooth = np.stack([gaussian(channel, sigma) for channel in filled])  # type: ignore[no-untyped-call]
    smooth /= np.maximum(weight, 1e-9)
    return np.where(is_seen, smooth.clip(0.0, 1.0), np.nan).astype(np.float32)


def pyramid(values: NDArray[np.float32], smallest_px: int = 256) -> list[NDArray[np.float32]]:
    """Return the levels of a pyramid: ``values`` and its halvings, until both sides are at most ``smallest_px``.

    There is at least one halving, unless ``values`` is a single pixel. A coarser pixel is the mean of those of its four
    pixels that are not NaN (NaN if all are NaN); odd sizes round up.

    Args:
        values: (channels, rows, columns).
        smallest_px: Longest side of the last level.
    """
    levels = [values]
    while max(levels[-1].shape[1:]) > smallest_px or (len(levels) == 1 and max(values.shape[1:]) > 1):
        levels.append(_halve(levels[-1]))
    return levels


def _halve(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return maps ``(classes, h, w)`` of half the size: means of blocks of 2 × 2, without NaN."""
    classes, height, width = values.shape
    # Pad with NaN, so that the mean at the border is that of the existing pixels.
    padded = np.pad(values, ((0, 0), (0, height % 2), (0, width % 2)), constant_values=np.nan)
    blocks = padded.reshape(classes, (height + 1) // 2, 2, (width + 1) // 2, 2).astype(np.float64)
    counts = (~np.isnan(blocks)).sum(axis=(2, 4))
    sums = np.nansum(blocks, axis=(2, 4))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).astype(np.float32)
