"""Whether encoded tiles contain RGB or YCbCr, decided from the tag, the headers of the tiles, and their pixels.

```
the tag   the tile                        the pixels                      believed
RGB       JFIF, or Adobe YCbCr            as YCbCr                        YCbCr, noted: Bio-Formats wrote such files
RGB       JFIF, or Adobe YCbCr            as RGB                          RGB: some scanners write a JFIF marker
YCbCr     Adobe RGB, or components R G B  as RGB                          RGB, noted
YCbCr     JPEG 2000 with its transform    not as YCbCr                    RGB after decoding, noted
either    a JP2 box that contradicts it   not as the tag says             as the box says, noted
either    a marker that contradicts it    of neither kind                 the tag, noted
RGB       nothing                         –                               RGB: a tag that nothing contradicts
```

Sources: JFIF 1.02; Adobe Technical Note 5116; JPEG 2000: `pathology.readers.facts.jpeg_2000`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pathology.errors import SlideError
from pathology.readers.facts.jpeg_2000 import CodestreamHeader, jpeg_2000_header
from pathology.readers.facts.slide_facts import Note
from pathology.readers.jpeg_tile import APP0, APP14, header_segments
from pathology.readers.source_level import RGB

COLOUR_FLAG = "colour"
_FRAMES = range(0xC0, 0xC3)
_PALE = 200
_NEUTRAL = 12
_GLASS_SHARE = 0.02
_DECIDES = 0.2
"""Least difference between the correlations, as RGB and as YCbCr, that decides."""
_TO_RGB = np.array([[1, 1, 1], [0, -0.34414, 1.772], [1.402, -0.71414, 0]], np.float32)
"""(Y, Cb, Cr) @ this matrix is (red, green, blue), apart from constants."""


class ColourError(SlideError):
    """The colours of tiles are not supported, or statements about them contradict each other and nothing decides."""


def jpeg_says(tile: bytes) -> str:
    """Return ``ycbcr`` or ``rgb``, the colour space that a JPEG's markers state; empty if they state none."""
    try:
        segments = [(marker, tile[start + 4 : end]) for marker, start, end in header_segments(tile)]
    except ValueError:
        return ""
    for marker, content in segments:
        if marker == APP14 and content[:5] == b"Adobe" and len(content) >= 12:
            # Byte 11 names the transform; 0 is none.
            return "rgb" if content[11] == 0 else "ycbcr"
    for marker, content in segments:
        if marker == APP0 and content[:5] == b"JFIF\0":
            return "ycbcr"
        # Identifiers of the three components, which some writers spell R, G, B.
        if marker in _FRAMES and len(content) >= 15 and bytes(content[6:15:3]) == b"RGB":
            return "rgb"
    return ""


def pixels_say(stored: Sequence[RGB]) -> str:
    """Return ``ycbcr`` or ``rgb``, judged by the stored components of some tiles; empty if they do not decide.

    White glass has three equal components in RGB, but (white, 128, 128) in YCbCr. In stained tissue, red, green and
    blue get darker together; luma and chroma do not, nor do RGB colours after a conversion from YCbCr.
    """
    if not stored:
        return ""
    values: npt.NDArray[np.float32] = np.concatenate([tile.reshape(-1, 3) for tile in stored]).astype(np.float32)
    first, second_and_third = values[:, 0], values[:, 1:]
    # In RGB and in YCbCr, the first component of white is bright.
    pale = first > _PALE
    # Twice the tolerance for RGB: Cb and Cr are about half a difference of two colours.
    as_rgb = (pale & (np.abs(second_and_third - first[:, None]).max(1) < 2 * _NEUTRAL)).mean()
    as_ycbcr = (pale & (np.abs(second_and_third - 128).max(1) < _NEUTRAL)).mean()
    if max(as_rgb, as_ycbcr) > _GLASS_SHARE:
        return "rgb" if as_rgb > as_ycbcr else "ycbcr"
    as_stored, converted = _agreement(values), _agreement(values @ _TO_RGB)
    if abs(as_stored - converted) < _DECIDES:
        return ""
    return "rgb" if as_stored > converted else "ycbcr"


def _agreement(values: npt.NDArray[np.float32]) -> float:
    """Return the lowest correlation between two of three channels, ``(n, 3)``; -1 if one of them is constant."""
    # A correlation with a constant is not defined.
    if values.std(0).min() < 0.5:
        return -1.0
    return float(np.corrcoef(values.T).min())


def believed_jpeg(declared: str, tiles: Sequence[bytes], decode: Callable[[bytes], RGB]) -> tuple[str, Note | None]:
    """Return (``ycbcr`` or ``rgb`` of the JPEG tiles of a page, note if its tag states the other one, else None).

    Args:
        declared: The colour space that the tag states.
        tiles: Some encoded tiles.
        decode: Decodes a tile to its stored components; raises any exception if it is damaged.
    """
    claims = {jpeg_says(tile) for tile in tiles} - {""}
    # Tiles that contradict each other do not count.
    if len(claims) != 1 or claims == {declared}:
        return declared, None
    (marked,) = claims
    shown = pixels_say(_decoded(tiles, decode))
    if shown == declared:
        return declared, None
    said_by = f"the tag PhotometricInterpretation says {_NAMES[declared]}, its JPEG tiles {_NAMES[marked]}"
    # If the pixels do not decide, believe the tag rather than the marker, as OpenSlide and libtiff do.
    believed = shown or declared
    return believed, _note(said_by if shown else f"{said_by}, and its pixels do not decide", believed)


def believed_jpeg_2000(
    declared: str, tiles: Sequence[bytes], decode: Callable[[bytes], RGB]
) -> tuple[str, Note | None]:
    """Return (``ycbcr`` or ``rgb`` of JPEG 2000 tiles after their own transform, note if tags state the other one).

    Args:
        declared: The colour space that the tags state; empty if they contradict each other.
        tiles: Some encoded tiles.
        decode: Decodes a tile, with its own transform; raises any exception if it is damaged.

    Raises:
        ColourError: The tiles have another colour space, or different ones; or nothing decides.
    """
    headers = {header for tile in tiles if (header := jpeg_2000_header(tile)) is not None}
    unknown_box = next((header.box for header in headers if header.box not in _SUPPORTED_BOXES), "")
    if unknown_box:
        raise ColourError(
            f"its JPEG 2000 tiles say that they hold {unknown_box}; only RGB, YCbCr and grey are supported"
        )
    if len({header.says for header in headers}) > 1:
        raise ColourError("some of its JPEG 2000 tiles say that they hold RGB, others YCbCr")
    header = next(iter(headers), CodestreamHeader(own_transform=False, subsampled=False))
    # Believe the tags if nothing contradicts them; else, in this order, the pixels, the tiles' headers, the tags.
    if declared and (header.says == declared or not header.says) and header.box != "grey" and not header.contradicts:
        return declared, None
    shown = "ycbcr" if header.subsampled else pixels_say(_decoded(tiles, decode))
    if shown == declared and header.says:
        return declared, None
    believed = shown or header.says or ("rgb" if header.own_transform else declared)
    tags = f"the TIFF's tags say {_NAMES[declared] if declared else 'both RGB and YCbCr'}"
    contradiction = ", its JPEG 2000 tiles ".join(filter(None, (tags, header.described)))
    if not believed:
        raise ColourError(f"{contradiction}, and its pixels do not decide; correct PhotometricInterpretation")
    return believed, _note(contradiction, believed)


_SUPPORTED_BOXES = ("", "rgb", "ycbcr", "grey")
_NAMES = {"rgb": "RGB", "ycbcr": "YCbCr"}


def _note(contradiction: str, believed: str) -> Note:
    return Note(COLOUR_FLAG, f"{contradiction}; read as {_NAMES[believed]}")


def _decoded(tiles: Sequence[bytes], decode: Callable[[bytes], RGB]) -> list[RGB]:
    """Return the tiles that can be decoded."""
    decoded = []
    for tile in tiles:
        try:
            decoded.append(decode(tile))
        except Exception:
            continue
    return decoded
