"""The tiles of a slide that its model weighs most, as pictures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.store.slide_store import SlideStore
from data.tiles.reader import StoreTiles
from data.tiles.tissue_tiles import TissueTiles
from pathology.pages import data_uri
from pathology.predict.report import TilePicture
from pathology.predict.slide_result import SlideResult, level0_of
from pathology.predict.tiles.tile_heatmap import at_tiles, contributions_of

MOST = 8
_PICTURE_PX = 256


def top_tiles(result: SlideResult) -> list[TilePicture]:
    """Return the tiles with the most attention, or if there is none, with the largest contribution; [] without tiles.

    Raises:
        StoreError: The store is damaged.
    """
    tiles, heatmap, channel = result.tiles, result.heatmap, result.channel
    if tiles is None or result.withheld:  # not a model of tiles, or no prediction
        return []
    level0, scores = level0_of(result), at_tiles(tiles, heatmap.scores[channel], heatmap.square_px)
    if heatmap.attention is None:
        weights = contributions_of(tiles, heatmap.values[channel], heatmap.square_px)
    else:
        weights = at_tiles(tiles, heatmap.attention, heatmap.square_px)
    chosen = np.argsort(-weights, kind="stable")[:MOST]
    chosen = chosen[weights[chosen] > 0]  # with max pooling, one tile of each class has weight
    pixels = _pictures(result.slide, tiles, chosen.tolist())
    pictures = []
    for rank, (index, tile) in enumerate(zip(chosen.tolist(), pixels, strict=True), 1):
        row, column = ((tiles.corners[index] + tiles.size_px / 2) / heatmap.square_px).tolist()
        x, y = level0.point(column, row, heatmap)
        text = f"{weights[index]:+.3g}" if heatmap.attention is None else f"{weights[index]:.3g} ×"
        image = Image.fromarray(np.ascontiguousarray(tile.transpose(1, 2, 0)))
        pictures.append(TilePicture(rank, data_uri(image, _PICTURE_PX), text, float(scores[index]), round(x), round(y)))
    return pictures


def _pictures(slide: SlideStore, tiles: TissueTiles, chosen: list[int]) -> list[NDArray[np.uint8]]:
    """Return the pixels of some tiles, each ``(3, h, w)``; if the store is coarser than the tiles, its own pixels."""
    reader = StoreTiles(slide, tiles)
    return [*reader.read_array(chosen)] if min(tiles.plane.step) >= 1 else reader.read_level(chosen)
