"""Heatmaps of tiles: scores, contributions and attention of tiles, on the slide's grid of squares.

tiles of 4 px, stride 4        a square is a tile
tiles of 4 px, stride 2        squares of 2 px: scores and attention are means of the tiles over a square,
+--+--+--+                     and a contribution is divided equally among the squares of its tile
|a |ab|b |
+--+--+--+
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.tiles.tissue_tiles import TissueTiles
from pathology.predict.heatmap import Heatmap


@dataclass(frozen=True, eq=False)
class TileValues:
    """Results of a model with K outputs for the N tiles of a slide.

    Attributes:
        logits: (K,): outputs of the slide.
        scores: (K, N): scores of the tiles, 0 to 1.
        contributions: (K, N): contributions of the tiles to the logits.
        attention: (N,): attention of the tiles, with sum 1 if they are the whole bag; None if the aggregator has none.
    """

    logits: NDArray[np.float64]
    scores: NDArray[np.floating]
    contributions: NDArray[np.floating]
    attention: NDArray[np.floating] | None


def square_px_of(tiles: TissueTiles) -> int:
    """Return the side of a square, in pixels of the tiles' plane: the largest that divides size and stride."""
    return math.gcd(tiles.size_px, tiles.stride_px) if tiles.square_px is None else tiles.square_px


def place_tiles(tiles: TissueTiles, values: TileValues, channels: Sequence[str], exclusive: bool) -> Heatmap:
    """Return the heatmap of a slide's tiles; attention is relative to the mean, so that 1 is an average tile.

    Args:
        tiles: The slide's N tiles.
        values: What the model, with K outputs, says of them.
        channels: Names of the outputs.
        exclusive: Whether scores of a tile sum to 1.
    """
    square_px, outputs = square_px_of(tiles), len(values.logits)
    height, width = (math.ceil(side / square_px) for side in tiles.plane.size_px)
    # For each tile, the squares that it covers, and whether these are inside of the slide.
    rows, columns, inside = _squares(tiles, square_px, (height, width))
    shares = values.contributions / inside.sum(1)  # squares beyond the slide's border do not exist
    # Values of the N tiles for each map: K of contributions, K of scores, one of the number of tiles over a square, and
    # one of attention if there is any.
    maps = [*shares, *values.scores, np.ones(len(tiles))]
    maps += [] if values.attention is None else [values.attention * len(tiles)]
    canvas = np.zeros((len(maps), height, width))
    for map_, of_tiles in zip(canvas, maps, strict=True):
        # `add.at`: overlapping tiles have squares in common.
        np.add.at(map_, (rows[inside], columns[inside]), np.broadcast_to(of_tiles[:, None], inside.shape)[inside])
    covers = canvas[2 * outputs]
    is_seen = covers > 0
    canvas[:, ~is_seen] = np.nan
    # All but contributions are means over tiles. Divide by a copy, because `covers` is itself one of the rows.
    canvas[outputs:, is_seen] /= covers[is_seen].copy()
    bias = values.logits - values.contributions.sum(1)
    return Heatmap(
        scores=canvas[outputs : 2 * outputs].astype(np.float32),
        values=canvas[:outputs].astype(np.float32),
        square_px=square_px,
        mpp=tiles.plane.mpp,
        slide_size_px=tiles.plane.size_px,
        class_names=tuple(channels),
        logits=tuple(values.logits.tolist()),
        bias=tuple(bias.tolist()),
        shared=(0.0,) * outputs,  # tiles have no background that squares would share
        one_to_one=True,
        exclusive=exclusive,
        of_tiles=True,
        attention=None if values.attention is None else canvas[-1].astype(np.float32),
    )


def at_tiles(tiles: TissueTiles, values: NDArray[np.floating], square_px: int) -> NDArray[np.float64]:
    """Return the mean of a map's squares in each tile, (N,).

    Args:
        tiles: The slide's tiles.
        values: The map, (rows, columns).
        square_px: Side of a square, which divides the size and the stride of tiles.
    """
    sums, counts = _sums_of_squares(tiles, values, square_px)
    mean: NDArray[np.float64] = sums / counts
    return mean


def contributions_of(tiles: TissueTiles, values: NDArray[np.floating], square_px: int) -> NDArray[np.float64]:
    """Return the contribution of each tile to a logit, (N,), whose sum is that of the map.

    A square that several tiles cover counts in equal parts for each of them, because the map has only their sum.

    Args:
        tiles: The slide's tiles.
        values: The map of contributions, (rows, columns), from `place_tiles`.
        square_px: Side of a square, which divides the size and the stride of tiles.
    """
    rows, columns, inside = _squares(tiles, square_px, (values.shape[0], values.shape[1]))
    covers = np.zeros(values.shape)
    np.add.at(covers, (rows[inside], columns[inside]), 1)
    sums, _ = _sums_of_squares(tiles, np.nan_to_num(values) / np.maximum(covers, 1), square_px)
    return sums


def _sums_of_squares(
    tiles: TissueTiles, values: NDArray[np.floating], square_px: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the sum of a map's squares in each tile, and their number without those beyond the slide; both (N,)."""
    rows, columns, inside = _squares(tiles, square_px, (values.shape[0], values.shape[1]))
    squares = np.where(inside, values[np.where(inside, rows, 0), np.where(inside, columns, 0)], 0.0)
    return squares.sum(1), inside.sum(1)


def _squares(
    tiles: TissueTiles, square_px: int, shape: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return (rows, columns, whether it is on the slide) of each square of each tile; each (N, squares of a tile)."""
    side = np.arange(tiles.size_px // square_px)
    down, across = (part.ravel() for part in np.meshgrid(side, side, indexing="ij"))
    corners = (tiles.corners + square_px // 2) // square_px  # rounded: tiles of other tools may lie between squares
    rows, columns = corners[:, :1] + down, corners[:, 1:] + across
    return rows, columns, (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])
