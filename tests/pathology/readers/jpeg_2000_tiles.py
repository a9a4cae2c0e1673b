"""JPEG 2000 tiles as encoders write them: bare codestreams and JP2 files, with and without a transform, subsampled."""

from __future__ import annotations

import struct

import imagecodecs
import numpy as np
from PIL import Image

from pathology.readers.source_level import RGB

_BOXES = {"rgb": 16, "ycbcr": 18, "grey": 17, "cmyk": 12}


def ycbcr_of(tile: RGB) -> RGB:
    """Return the components Y, Cb and Cr."""
    return np.asarray(Image.fromarray(tile).convert("YCbCr"))


def encoded(tile: RGB, holds: str, box: str = "", transform: bool = False) -> bytes:
    """Return a tile without loss.

    Args:
        tile: ``(h, w, 3)`` RGB.
        holds: ``rgb`` or ``ycbcr``, before the transform.
        box: What the box of the JP2 file around it says; empty: a bare codestream.
        transform: Whether the codestream transforms its components.
    """
    stored = ycbcr_of(tile) if holds == "ycbcr" else tile
    kind = "jp2" if box else "j2k"
    data = bytes(
        imagecodecs.jpeg2k_encode(
            np.ascontiguousarray(stored), level=0, reversible=True, mct=transform, codecformat=kind, colorspace="SRGB"
        )
    )
    return data.replace(b"colr\1\0\0\0\0\0\x10", b"colr\1\0\0\0\0\0" + bytes([_BOXES[box]])) if box else data


def subsampled(tile: RGB) -> bytes:
    """Return a codestream of Y and of every second column of Cb and Cr, made of three of one component."""
    ycbcr = ycbcr_of(tile)
    planes = ycbcr[..., 0], ycbcr[:, ::2, 1], ycbcr[:, ::2, 2]
    kind = {"level": 0, "codecformat": "j2k", "reversible": True, "resolutions": 3}
    parts = [_segments(imagecodecs.jpeg2k_encode(np.ascontiguousarray(plane), **kind)) for plane in planes]
    head, _ = parts[0]
    size, coding = head[0xFF51], bytearray(head[0xFF52])
    coding[5] = 4  # packets of one component after those of another
    coding[8] = 0  # no transform
    components = b"".join(bytes([7, columns, 1]) for columns in (1, 2, 2))
    size = size[:2] + struct.pack(">H", 38 + len(components)) + size[4:38] + struct.pack(">H", 3) + components
    packets = b"".join(data for _, data in parts)
    tile_part = struct.pack(">HHHIBB", 0xFF90, 10, 0, 14 + len(packets), 0, 1)
    return b"\xff\x4f" + size + bytes(coding) + head[0xFF5C] + tile_part + b"\xff\x93" + packets + b"\xff\xd9"


def _segments(stream: bytes) -> tuple[dict[int, bytes], bytes]:
    """Return the segments of the main header by their marker, and the packets."""
    found, at = {}, 2
    while (marker := int.from_bytes(stream[at : at + 2], "big")) != 0xFF90:
        end = at + 2 + int.from_bytes(stream[at + 2 : at + 4], "big")
        found[marker] = stream[at:end]
        at = end
    return found, stream[stream.index(b"\xff\x93", at) + 2 : stream.rindex(b"\xff\xd9")]
