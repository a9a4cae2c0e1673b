"""A scanner's JPEG tiles into a store as they are: nothing is decoded or encoded, every pixel is the source's.

Levels are those that the scanner made, and a chunk is a tile. Whether the stored tiles show what the slide's reader
shows is looked at on some tiles of every level before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simplejpeg

from data.store.codec import Parts, PixelCodec
from data.store.layout import BACKGROUND, SHARD_PX, ArrayLayout
from data.store.writer import SlideWriter, StoredLevel
from pathology.errors import SlideError, TileError
from pathology.ingest.lossless_tile import TileJoiner
from pathology.readers.jpeg_tile import JpegDecoder
from pathology.readers.slide_file import coalesced
from pathology.readers.sources import SlideSource
from pathology.readers.tiff_level import TiffLevel
from pathology.readers.tiff_source import TiffSource

_Place = tuple[bytes, int, int]
"""What was read of a file, and where in it a tile begins and ends."""
_LOOKED_AT = 5
"""Tiles of each level that are decoded and compared before the copy begins."""


@dataclass(slots=True)
class Copied:
    """What a copy did: tiles of the finest level, and the damaged tiles of any level, left out and white."""

    tiles: int
    bad: list[str] = field(default_factory=list)


class LosslessSlide:
    """A slide whose tiles can be copied.

    Args:
        slide: The slide, open for reading; stays open.

    Raises:
        SlideError: Its pixels are not in JPEG tiles, or these cannot stand alone; says what they are.
    """

    def __init__(self, slide: SlideSource) -> None:
        if not isinstance(slide, TiffSource):
            raise SlideError(f"--lossless needs a TIFF of upright JPEG tiles; the slide is {slide.vendor}. {_WITHOUT}")
        self._slide = slide
        self._levels = slide.tiff_levels
        self._joiners = tuple(map(_joiner, self._levels))
        self.layouts = tuple(map(_layout, self._levels))

    def stored_levels(self, mpp: tuple[float, float]) -> tuple[StoredLevel, ...]:
        """Return the levels for a `SlideWriter`; ``mpp`` (y, x) is that of the finest."""
        pairs = zip(self.layouts, self._slide.levels, strict=True)
        return tuple(
            StoredLevel(layout, (mpp[0] * known.downsample[0], mpp[1] * known.downsample[1])) for layout, known in pairs
        )

    def check(self) -> None:
        """Compare some tiles of each level, as they would be stored, with what the slide's reader shows.

        Raises:
            SlideError: They differ.
        """
        for k, level in enumerate(self._levels):
            present = np.flatnonzero(level.lengths)
            places = np.unique(np.linspace(0, len(present) - 1, _LOOKED_AT).astype(int)) if len(present) else []
            missing = np.flatnonzero(level.lengths == 0)[:1]
            for index in [*present[places].tolist(), *missing.tolist()]:
                self._compare(k, index)

    def copy(self, writer: SlideWriter, max_bad: float = 0.0) -> Copied:
        """Copy every tile of every level; what the scanner left out stays out and reads as white.

        Memory: the tiles of three shards.

        Args:
            writer: Made for `stored_levels`.
            max_bad: Share of tiles that may be damaged, in the number of the finest level's; those are left out, too.
                0: the first ends the slide.

        Raises:
            SlideError: More tiles are damaged.
            OSError: The store cannot be written.
        """
        copied = Copied(tiles=len(self._levels[0].offsets))
        for k, layout in enumerate(self.layouts):
            for file in layout.files():
                indices = _tiles_of_file(self._levels[k], layout, file)
                writer.write_encoded(k, file, [*self._chunks(k, indices, copied, max_bad)])
        return copied

    def _chunks(self, k: int, indices: Sequence[int], copied: Copied, max_bad: float) -> Iterator[Parts | None]:
        """Yield the tiles as chunks: views of what was read, their headers before them; None for what is left out."""
        join = self._joiners[k].join
        for index, place in self._tiles(self._levels[k], indices):
            if place is None:
                yield None
                continue
            block, start, end = place
            try:
                head, at = join(block, start, end)
            except TileError as error:
                copied.bad.append(f"tile {index} of level {k}: {error}")
                _refuse_too_many(copied, max_bad)
                yield None
            else:
                yield head, np.frombuffer(block, np.uint8, end - at, at)

    def _tiles(self, level: TiffLevel, indices: Sequence[int]) -> Iterator[tuple[int, _Place | None]]:
        """Yield (index, where its bytes are) in the order asked, None for tiles that were left out; few, long reads."""
        present = [index for index in indices if level.lengths[index]]
        offsets, lengths = level.offsets[present].tolist(), level.lengths[present].tolist()
        found: dict[int, _Place] = {}
        for span in coalesced(offsets, lengths):
            block = self._slide.file.read(span.offset, span.length)
            for member in span.members:
                start = offsets[member] - span.offset
                found[present[member]] = block, start, min(start + lengths[member], len(block))
        yield from ((index, found.get(index)) for index in indices)

    def _compare(self, k: int, index: int) -> None:
        level = self._levels[k]
        box = level.tile_box(index)
        ((_, place),) = self._tiles(level, [index])
        try:
            shown = self._slide.read(box, k)
            stored: Any = np.full_like(shown, BACKGROUND)
            if place is not None:
                block, start, end = place
                head, at = self._joiners[k].join(block, start, end)
                stored = simplejpeg.decode_jpeg(head + block[at:end], "RGB", strict=True)
        except (TileError, ValueError):
            return  # damaged: the copy finds it, names it and counts it
        if not np.array_equal(stored[: box.height, : box.width], shown):
            raise SlideError(
                f"--lossless: tile {index} of level {k} would not look as the slide's reader shows it. {_WITHOUT}"
            )


_WITHOUT = "Ingest it without --lossless"


def _refuse_too_many(copied: Copied, max_bad: float) -> None:
    if len(copied.bad) > max_bad * copied.tiles:
        raise SlideError(
            f"{len(copied.bad)} of {copied.tiles} tiles are damaged (--max-bad {max_bad:g}): {copied.bad[0]}"
        )


def _tiles_of_file(level: TiffLevel, layout: ArrayLayout, file: tuple[int, int]) -> list[int]:
    """Return the indices of the tiles that are a file's chunks, in the order of its used slots."""
    rows, columns = layout.slots
    corner = file[0] * rows * level.columns + file[1] * columns
    return [corner + slot // columns * level.columns + slot % columns for slot in layout.used_slots(file)]


def _joiner(level: TiffLevel) -> TileJoiner:
    if not isinstance(level.decode, JpegDecoder) or level.tile_width_px >= level.width_px > 2 * SHARD_PX:
        raise SlideError(
            f"--lossless needs JPEG tiles; level {level.width_px} × {level.height_px} px is in {level.compression} "
            f"blocks of {level.tile_width_px} × {level.tile_height_px} px. {_WITHOUT}"
        )
    return TileJoiner(level.decode.prefix, (level.tile_height_px, level.tile_width_px))


def _layout(level: TiffLevel) -> ArrayLayout:
    """Return where a level's tiles go: a chunk each, in shards of about the usual size."""
    tile = (level.tile_height_px, level.tile_width_px)
    height, width = (side * max(1, round(SHARD_PX / side)) for side in tile)
    return ArrayLayout((3, level.height_px, level.width_px), tile, (height, width), codec=PixelCodec("jpeg", None))
