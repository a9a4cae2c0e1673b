"""JPEG tiles of a TIFF, decoded by libjpeg-turbo in its strict mode.

The quantisation and Huffman tables may be stored once, in the TIFF's tag JPEGTables, instead of in each tile. The
colour space is the one that the TIFF states, whatever the tile's own markers say: Aperio writes RGB tiles with the
component numbers of YCbCr. So each tile is decoded as

```
SOI  Adobe(RGB or YCbCr)  tables of the TIFF  | the tile's own segments without APP0 and APP14 | scan  EOI
```

(TIFF Technical Note 2; Adobe Technical Note 5116 for the marker, whose last byte is the colour transform.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import simplejpeg

from pathology.readers.source_level import RGB

_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
SOS = 0xDA
APP0, APP14 = 0xE0, 0xEE
_RESTARTS = range(0xD0, 0xD8)
_ADOBE = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True)
class JpegDecoder:
    """Decodes one tile at a time; may be called from several threads.

    Attributes:
        height_px: Rows of a tile.
        width_px: Columns of a tile.
        prefix: From `jpeg_prefix`.
    """

    height_px: int
    width_px: int
    prefix: bytes

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return a new ``(h, w, 3)`` uint8 array of the tile's size; the last strip may have fewer rows.

        Raises:
            ValueError: The tile is damaged or has no end marker; warnings of libjpeg are errors here.
        """
        segments = _split_segments(data)
        if data.rfind(_EOI) < segments.scan_start:
            raise ValueError("its JPEG is cut off: it has no end marker")
        # Decode into a buffer of the tile's size: a damaged header that states gigabytes then allocates no memory.
        buffer: RGB = np.empty((self.height_px, self.width_px, 3), np.uint8)
        # The prefix states the colour space, so the tile's own segments come without markers that state another one.
        complete = self.prefix + segments.others + data[segments.scan_start :]
        pixels: RGB = simplejpeg.decode_jpeg(complete, "RGB", buffer=buffer, strict=True)
        return pixels


@dataclass(frozen=True, slots=True)
class RestartDecoder:
    """Decodes the data between two restart markers of one large JPEG as a JPEG of its own (Hamamatsu NDPI).

    Attributes:
        height_px: Rows of a block: one row of MCUs (JPEG's minimum coded units).
        width_px: Columns of a block: one restart interval.
        header: The JPEG's header up to and including the scan header, with the size of one block in it.
    """

    height_px: int
    width_px: int
    header: bytes

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return a new ``(height_px, width_px, 3)`` uint8 array.

        Raises:
            ValueError: The block is damaged or has no marker at its end.
        """
        # Replace the restart marker at the end of the interval by EOI, the end of a JPEG.
        end = len(data) - 2 if data[-2:-1] == b"\xff" and data[-1] in _RESTARTS else data.rfind(_EOI)
        if end < 0:
            raise ValueError("its JPEG is cut off: it has no marker at its end")
        buffer: RGB = np.empty((self.height_px, self.width_px, 3), np.uint8)
        pixels: RGB = simplejpeg.decode_jpeg(self.header + data[:end] + _EOI, "RGB", buffer=buffer, strict=True)
        return pixels


def stored_jpeg(data: bytes) -> RGB:
    """Decode a JPEG of three components; return these components ``(h, w, 3)``, without any colour conversion.

    Raises:
        ValueError: It is damaged.
    """
    segments = _split_segments(data)
    # Stated to be RGB, whatever they are, so that the decoder does not convert them.
    complete = jpeg_prefix(None, ycbcr=False) + segments.others + data[segments.scan_start :]
    pixels: RGB = simplejpeg.decode_jpeg(complete, "RGB", strict=True)
    return pixels


def jpeg_prefix(tables: bytes | None, ycbcr: bool) -> bytes:
    """Return the bytes to put before each tile's own segments.

    Args:
        tables: Value of the tag JPEGTables, which starts with SOI and ends with EOI; None if the TIFF has none.
        ycbcr: Whether the TIFF states YCbCr; otherwise RGB.

    Returns:
        The start marker, the Adobe marker with the colour space, and the tables.
    """
    # Remove the start and end markers of the tables' stream, because a JPEG has only one of each.
    segments = b"" if not tables else tables.removeprefix(_SOI).removesuffix(_EOI)
    return _SOI + _ADOBE + bytes([1 if ycbcr else 0]) + segments


@dataclass(frozen=True, slots=True)
class _Segments:
    others: bytes
    """The segments before the scan, without those that state the colour space."""
    scan_start: int
    """Offset of the scan's header."""


def _split_segments(data: bytes) -> _Segments:
    """Return the offset of a JPEG's scan, and the segments before it without those about colours.

    Raises:
        ValueError: The header is damaged.
    """
    segments = list(header_segments(data))
    kept_segments = [data[start:end] for marker, start, end in segments[:-1] if marker not in (APP0, APP14)]
    return _Segments(b"".join(kept_segments), segments[-1][1])


def header_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of the segments of a JPEG, up to and including the header of the (first) scan.

    Raises:
        ValueError: There is no start marker, or the header is damaged.
    """
    if data[:2] != _SOI:
        raise ValueError("its JPEG has no start marker")
    at, marker = 2, 0
    while marker != SOS:
        if at + 4 > len(data) or data[at] != 0xFF:
            raise ValueError("its JPEG header is damaged")
        marker = data[at + 1]
        if marker == 0xFF:  # any number of fill bytes may precede a marker
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield marker, at, end
        at = end
