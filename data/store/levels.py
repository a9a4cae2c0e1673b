"""The levels of a slide that is to be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.store.codec import ZSTD, PixelCodec
from data.store.layout import CHUNK_PX, SHARD_PX, ArrayLayout


@dataclass(frozen=True, slots=True)
class LevelSize:
    """Height and width of one level in pixels."""

    height_px: int
    width_px: int


@dataclass(frozen=True, slots=True)
class StoredLevel:
    """One level to write: where its pixels go, and its microns per pixel (y, x)."""

    layout: ArrayLayout
    mpp: tuple[float, float]


def pyramid_levels(
    sizes: Sequence[LevelSize], mpp_um: float, codec: PixelCodec = ZSTD, sharded: bool = True
) -> tuple[StoredLevel, ...]:
    """Return the levels of a pyramid that halves.

    Args:
        sizes: Finest first; each half of the one before.
        mpp_um: Microns per pixel of the finest, both axes.
        codec: Of every chunk; default ``zstd:1``.
        sharded: Files are shards of 8 × 8 chunks; otherwise every chunk is a file.
    """
    side = SHARD_PX if sharded else CHUNK_PX
    found = []
    for k, size in enumerate(sizes):
        shape = (3, size.height_px, size.width_px)
        layout = ArrayLayout(shape, (CHUNK_PX, CHUNK_PX), (side, side), sharded, codec)
        found.append(StoredLevel(layout, (mpp_um * 2**k, mpp_um * 2**k)))
    return tuple(found)
