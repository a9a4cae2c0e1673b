"""JPEG tiles of a TIFF, decoded by libjpeg-turbo in its strict mode.

A tile may lack its tables (they stand once, in the tag JPEGTables) and must be read in the colours that the TIFF
states, whatever its own markers say: Aperio writes RGB tiles with the component numbers of YCbCr. So each is decoded as

```
SOI  Adobe(RGB or YCbCr)  tables of the TIFF  | the tile's own segments, its APP0 and APP14 left out | scan  EOI
```

(TIFF Technical Note 2; Adobe Technical Note 5116 for the marker, whose last byte is the colour transform.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import simplejpeg

from pathology.readers.source_level import RGB

_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_SOS = 0xDA
_APP0, _APP14 = 0xE0, 0xEE
_RESTARTS = range(0xD0, 0xD8)
_ADOBE = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class JpegDecoder:
    """Decodes one tile at a time; threads may share it.

    Attributes:
        height_px: Rows of a tile.
        width_px: Columns of a tile.
        prefix: From `jpeg_prefix`.
    """

    height_px: int
    width_px: int
    prefix: bytes

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return ``(h, w, 3)`` uint8, new, at most the tile's size; a last strip has fewer rows.

        Raises:
            ValueError: Anything is wrong with the tile, a missing end included: libjpeg's warnings are errors here.
        """
        scan = _own_segments(data)
        if data.rfind(_EOI) < scan.start:
            raise ValueError("its JPEG is cut off: it has no end marker")
        # A buffer of the right size: a damaged header that asks for gigabytes is refused, not allocated.
        buffer: RGB = np.empty((self.height_px, self.width_px, 3), np.uint8)
        pixels: RGB = simplejpeg.decode_jpeg(
            self.prefix + scan.kept + data[scan.start :], "RGB", buffer=buffer, strict=True
        )
        return pixels


@dataclass(frozen=True, slots=True)
class RestartDecoder:
    """Decodes what stands between two restart markers of one large JPEG, as a picture of its own (Hamamatsu NDPI).

    Attributes:
        height_px: Rows of a block: those of one unit of the JPEG.
        width_px: Columns of a block: a restart interval.
        header: The JPEG's header with the size of a block in it, up to and with that of the scan.
    """

    height_px: int
    width_px: int
    header: bytes

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return ``(height_px, width_px, 3)`` uint8, new.

        Raises:
            ValueError: Anything is wrong with the block, a missing marker at its end included.
        """
        end = len(data) - 2 if data[-2:-1] == b"\xff" and data[-1] in _RESTARTS else data.rfind(_EOI)
        if end < 0:
            raise ValueError("its JPEG is cut off: it has no marker at its end")
        buffer: RGB = np.empty((self.height_px, self.width_px, 3), np.uint8)
        pixels: RGB = simplejpeg.decode_jpeg(self.header + data[:end] + _EOI, "RGB", buffer=buffer, strict=True)
        return pixels


def jpeg_prefix(tables: bytes | None, ycbcr: bool) -> bytes:
    """Return what stands before each tile's own segments: start, colours, tables (the tag, with its SOI and EOI)."""
    own = b"" if not tables else tables.removeprefix(_SOI).removesuffix(_EOI)
    return _SOI + _ADOBE + bytes([1 if ycbcr else 0]) + own


@dataclass(frozen=True, slots=True)
class _Segments:
    kept: bytes
    """What stands before the scan, without the markers that state colours."""
    start: int
    """Where the scan's header begins."""


def _own_segments(data: bytes) -> _Segments:
    if data[:2] != _SOI:
        raise ValueError("its JPEG has no start marker")
    kept: list[bytes] = []
    at = 2
    while True:
        if at + 4 > len(data) or data[at] != 0xFF:
            raise ValueError("its JPEG header is damaged")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == _SOS:
            return _Segments(b"".join(kept), at)
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker not in (_APP0, _APP14):
            kept.append(data[at:end])
        at = end
