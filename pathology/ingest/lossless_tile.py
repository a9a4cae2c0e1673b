"""One JPEG tile of a TIFF made to stand alone: with its tables, and a marker that says what its colours are.

```
tile      SOI [APP0 …]     SOF [DHT …] SOS coded … EOI
whole     SOI APP14 tables SOF [DHT …] SOS coded … EOI
          └─── prefix ───┘
```

What was coded is copied byte by byte. Source: ISO/IEC 10918-1, annex B.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathology.errors import TileError

_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_APP0, _APP14, _SOS = 0xE0, 0xEE, 0xDA
_FRAMES = {0xC0, 0xC1, 0xC2}
"""Baseline, extended and progressive frames of Huffman-coded samples."""
_ALL_FRAMES = _FRAMES | {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_NO_HEADER = "its JPEG has no header that can be read"


@dataclass(slots=True)
class TileJoiner:
    """Makes tiles of one level stand alone, as the slide's decoder sees them.

    Attributes:
        prefix: Start, colours and tables, from `pathology.readers.jpeg_tile.jpeg_prefix`.
        tile_px: (height, width) that every tile must have.
    """

    prefix: bytes
    tile_px: tuple[int, int]
    _seen: bytes = field(default=b"", repr=False)
    _made: bytes = field(default=b"", repr=False)

    def join(self, block: bytes, start: int = 0, end: int | None = None) -> tuple[bytes, int]:
        """Return what the JPEG of its own begins with, and where in ``block`` the rest of it is, up to ``end``.

        Nothing is copied: what was coded is most of the tile.

        Args:
            block: Bytes of the file that hold the tile.
            start: Where in them the tile begins.
            end: Where it ends; default: with the block.

        Raises:
            TileError: It is no JPEG of this size with three colours, or it does not end.
        """
        end = len(block) if end is None else end
        if not (self._seen and block.startswith(self._seen, start, end)):
            # Nearly all tiles of a level begin alike: what is true of one's header is true of theirs.
            tile = block[start:end]
            kept, coded = self._header(tile)
            self._seen, self._made = tile[:coded], self.prefix + kept
        coded = start + len(self._seen)
        if block.rfind(_EOI, coded, end) < 0:
            raise TileError("its JPEG is cut off: it has no end marker")
        return self._made, coded

    def _header(self, tile: bytes) -> tuple[bytes, int]:
        """Return the tile's own segments but those that state colours, and where its coded data begins."""
        if not tile.startswith(_SOI):
            raise TileError("its JPEG has no start marker")
        kept, at, frames = [], len(_SOI), 0
        while at + 4 <= len(tile) and tile[at] == 0xFF:
            marker = tile[at + 1]
            if marker == 0xFF:  # any number of these may stand before a marker
                at += 1
                continue
            end = at + 2 + int.from_bytes(tile[at + 2 : at + 4], "big")
            if marker in _ALL_FRAMES:
                self._check_frame(marker, tile[at + 4 : end])
                frames += 1
            if marker not in (_APP0, _APP14):
                kept.append(tile[at:end])
            if marker == _SOS and frames == 1 and end <= len(tile):
                return b"".join(kept), end
            at = end
        raise TileError(_NO_HEADER)

    def _check_frame(self, marker: int, frame: bytes) -> None:
        if len(frame) < 6:
            raise TileError(_NO_HEADER)
        if marker not in _FRAMES or frame[0] != 8 or frame[5] != 3:
            raise TileError(f"its JPEG is not of three 8-bit colours but of {frame[5]} with {frame[0]} bits")
        size = (int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big"))
        if size != self.tile_px:
            raise TileError(f"its JPEG has {size[0]} × {size[1]} px, not {self.tile_px[0]} × {self.tile_px[1]}")
