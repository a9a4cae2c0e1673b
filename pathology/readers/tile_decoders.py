"""Decoders of TIFF tiles, one for each compression. A damaged tile is an error, never wrong pixels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import tifffile

from pathology.errors import SlideError
from pathology.readers.facts.colour import believed_jpeg, believed_jpeg_2000
from pathology.readers.facts.jpeg_2000 import codestream_of, is_subsampled, without_colour
from pathology.readers.facts.sample_kinds import conversion, is_unsigned, sample_format
from pathology.readers.facts.slide_facts import Note
from pathology.readers.jpeg_tile import JpegDecoder, RestartDecoder, jpeg_prefix
from pathology.readers.source_level import RGB

Decode = Callable[[bytes, int], RGB]
"""Decodes a tile's bytes (second argument: its index) to ``(h, w, 3)`` uint8; raises any exception if it is damaged."""

JPEG = 7
_APERIO_YCBCR, _APERIO_RGB = 33003, 33005
JPEG_2000 = (_APERIO_YCBCR, _APERIO_RGB, 34712)
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _YCBCR = 0, 1, 2, 3, 6
_OLD_JPEG = 6
_SAMPLED_TILES = 3
_MAY_BE_YCBCR = (JPEG, *JPEG_2000)
_ASSOCIATED, _UNASSOCIATED = 1, 2


def make_decoder(page: Any, height_px: int, width_px: int, colour: str | None = None) -> Decode:
    """Return the decoder for the tiles of a TIFF page; the file must still be open.

    Args:
        page: A page of tifffile.
        height_px: Rows of a tile.
        width_px: Columns of a tile.
        colour: ``rgb`` or ``ycbcr``; default: what the page's tags say.

    Raises:
        SlideError: The page is not 8-bit RGB (with or without alpha) or grey, or its compression is not supported.
    """
    _check_page(page)
    decode = _decoder_of_samples(page, height_px, width_px, colour or _declared(page))
    if page.photometric == _PALETTE:
        return PaletteDecoder(decode, _palette(page.colormap))
    return decode if page.samplesperpixel > 1 else GreyDecoder(decode, page.photometric == _WHITE_IS_ZERO)


def believed_colour(page: Any, height_px: int, width_px: int) -> tuple[str, Note | None]:
    """Return ``rgb`` or ``ycbcr``, and a note if that is not what the tags say; see `pathology.readers.facts.colour`.

    Args:
        page: A page of tifffile; the file must still be open.
        height_px: Rows of a tile.
        width_px: Columns of a tile.
    """
    declared = _declared(page)
    # Tiles of one long JPEG (`RestartDecoder`) have no headers that could say anything.
    if page.samplesperpixel != 3 or page.compression not in _MAY_BE_YCBCR or page.jpegheader:
        return declared, None
    tiles = _sample_of(page)
    if page.compression in JPEG_2000:
        components = Jpeg2000Decoder(ycbcr=False, alpha=0)
        return believed_jpeg_2000(declared, tiles, lambda tile: components(tile, 0))
    stored = JpegDecoder(height_px, width_px, jpeg_prefix(page.jpegtables, ycbcr=False))
    return believed_jpeg(declared, tiles, lambda tile: stored(tile, 0))


def _declared(page: Any) -> str:
    """Return ``rgb`` or ``ycbcr``; empty if the tags contradict each other."""
    photometric = "ycbcr" if page.photometric == _YCBCR and page.compression in _MAY_BE_YCBCR else "rgb"
    if page.compression == _APERIO_YCBCR:  # its PhotometricInterpretation is RGB, too
        return "ycbcr"
    return "" if page.compression == _APERIO_RGB and photometric == "ycbcr" else photometric


def _sample_of(page: Any) -> list[bytes]:
    """Return some encoded tiles of the middle of a page."""
    stored = [k for k, length in enumerate(page.databytecounts) if length]
    # From the middle, where the tissue is: tiles at the border are glass only.
    chosen = [stored[len(stored) * k // (_SAMPLED_TILES + 1)] for k in range(1, _SAMPLED_TILES + 1)] if stored else []
    samples = []
    for k in dict.fromkeys(chosen):
        page.parent.filehandle.seek(page.dataoffsets[k])
        samples.append(page.parent.filehandle.read(page.databytecounts[k]))
    return samples


def _palette(table: npt.NDArray[np.uint16]) -> RGB:
    """Return ``(256, 3)`` of a table of 16-bit colours; some programs write 8-bit ones."""
    colours: RGB = (table >> 8 if table.max() > 255 else table).T.astype(np.uint8)
    return colours


def compression_name(page: Any) -> str:
    """Return the name of a page's compression, as in ``JPEG``, ``grey JPEG``, ``LZW`` or ``uncompressed``."""
    name = "uncompressed" if page.compression == 1 else _name_of(tifffile.COMPRESSION, page.compression)
    return f"grey {name}" if page.samplesperpixel == 1 else name


def _decoder_of_samples(page: Any, height_px: int, width_px: int, colour: str) -> Decode:
    """Return the decoder of the stored samples; grey stays one sample per pixel unless the codec returns RGB."""
    if page.compression == JPEG and page.jpegheader:
        return RestartDecoder(height_px, width_px, page.jpegheader)
    if page.compression == JPEG and page.samplesperpixel in (1, 3):
        return JpegDecoder(height_px, width_px, jpeg_prefix(page.jpegtables, colour == "ycbcr"))
    if page.compression in JPEG_2000:
        return Jpeg2000Decoder(colour == "ycbcr", _alpha_of(page))
    if page.compression == 1 and page.fillorder == 1:
        return PlainDecoder(width_px, page.samplesperpixel, _alpha_of(page))
    if page.compression in (_OLD_JPEG, JPEG):  # its decoder returns wrong pixels for damaged tiles
        raise SlideError(
            f"its type of JPEG cannot be checked for damage: {page.samplesperpixel} samples, "
            f"{_name_of(tifffile.COMPRESSION, page.compression)}. {conversion(page)}"
        )
    decode = page.decode  # tifffile needs the open file to make it, not to call it
    return CodecDecoder(decode, page.jpegtables, _alpha_of(page))


def _check_page(page: Any) -> None:
    """Refuse a page whose pixels are not 8-bit colours or grey."""
    is_single = page.samplesperpixel == 1
    # `Jpeg2000Decoder` returns colours only.
    is_grey = is_single and page.photometric in (_WHITE_IS_ZERO, _BLACK_IS_ZERO) and page.compression not in JPEG_2000
    # Indices into a palette make no sense after a compression with loss.
    is_palette = is_single and page.photometric == _PALETTE and page.compression not in _MAY_BE_YCBCR
    has_colours = page.photometric == _RGB or (page.photometric == _YCBCR and page.compression in _MAY_BE_YCBCR)
    # Perhaps with alpha; the samples of a pixel are side by side.
    is_rgb = has_colours and page.samplesperpixel in (3, 4) and page.planarconfig == 1
    if page.bitspersample == 8 and is_unsigned(page) and (is_rgb or is_palette or is_grey):
        return
    depth = f"{sample_format(page)}{page.bitspersample} bit"
    kind = f"{page.samplesperpixel} × {depth} {_name_of(tifffile.PHOTOMETRIC, page.photometric)}"
    planes = " in separate planes" if page.samplesperpixel > 1 and page.planarconfig != 1 else ""
    packed = _name_of(tifffile.COMPRESSION, page.compression)
    problem = f"its pixels are {kind}{planes} ({packed}); only 8-bit RGB or grey is supported"
    raise SlideError(f"{problem}. {conversion(page)}")


def _name_of(names: type[IntEnum], value: int) -> str:
    try:
        return names(value).name
    except ValueError:
        return str(value)


def _alpha_of(page: Any) -> int:
    """Return the use of the fourth sample: 1 associated alpha, 2 unassociated alpha, 0 ignored.

    See TIFF 6.0, ExtraSamples. A fourth sample of unspecified meaning is ignored.
    """
    extra = page.extrasamples
    return int(extra[0]) if page.samplesperpixel == 4 and extra else 0


@dataclass(frozen=True, slots=True)
class CodecDecoder:
    """Deflate, LZW, zstd, WebP and other codecs of tifffile (which uses imagecodecs), with their predictors.

    Attributes:
        decode: The page's ``decode`` of tifffile.
        jpegtables: Value of the tag JPEGTables; None if the page has none.
        alpha: From `_alpha_of`.
    """

    decode: Callable[..., Any]
    jpegtables: bytes | None
    alpha: int

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return ``(h, w, 3)``; see `Decode`."""
        decoded, _, _ = self.decode(data, index, jpegtables=self.jpegtables)
        if decoded is None:
            raise ValueError("it cannot be decoded")
        return _over_white(decoded[0], self.alpha)


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """Uncompressed tiles and strips; the last strip may have fewer rows.

    Attributes:
        width_px: Columns of a tile.
        samples: Samples of a pixel.
        alpha: From `_alpha_of`.
    """

    width_px: int
    samples: int
    alpha: int

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return ``(h, w, 3)``, a read-only view of ``data`` if there is no alpha; see `Decode`."""
        return _over_white(np.frombuffer(data, np.uint8).reshape(-1, self.width_px, self.samples), self.alpha)


@dataclass(frozen=True, slots=True)
class GreyDecoder:
    """Grey tiles as RGB.

    Attributes:
        decode: Decoder whose first (or only) sample is the grey value.
        inverted: Whether 0 is white.
    """

    decode: Decode
    inverted: bool

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return ``(h, w, 3)``, a read-only view; see `Decode`."""
        grey: RGB = self.decode(data, index)[..., :1]
        shown: RGB = 255 - grey if self.inverted else grey
        return np.broadcast_to(shown, (*grey.shape[:2], 3))


@dataclass(frozen=True, slots=True)
class PaletteDecoder:
    """Indices of a table of colours as RGB.

    Attributes:
        decode: Decoder whose only sample is the index.
        colours: ``(256, 3)`` uint8.
    """

    decode: Decode
    colours: RGB

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return a new ``(h, w, 3)``; see `Decode`."""
        pixels: RGB = self.colours[self.decode(data, index)[..., 0]]
        return pixels


_NOT_IN_PACKETS = re.compile(rb"\xff[\x94-\xd8\xda-\xff]")
"""Byte pairs that cannot occur in JPEG 2000 packets (ISO 15444-1, A.1.3: above FF8F there are only markers)."""


@dataclass(frozen=True, slots=True)
class Jpeg2000Decoder:
    """JPEG 2000 tiles. OpenJPEG makes up missing data, so the end marker and the packets are checked first.

    Attributes:
        ycbcr: Whether they hold YCbCr.
        alpha: From `_alpha_of`.
    """

    ycbcr: bool
    alpha: int

    def __call__(self, data: bytes, index: int) -> RGB:
        """Return ``(h, w, 3)``; see `Decode`."""
        stream = codestream_of(data)
        _check_codestream(stream)
        pixels = imagecodecs.jpeg2k_decode(without_colour(data), numthreads=1)
        if pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or pixels.dtype != np.uint8:
            raise ValueError(f"its JPEG 2000 has shape {pixels.shape} {pixels.dtype}; only 8-bit RGB is supported")
        if self.ycbcr and not is_subsampled(stream):  # subsampled ones were converted by the library
            return _rgb_of_ycbcr(pixels[..., :3])
        return _over_white(pixels, self.alpha if pixels.shape[2] == 4 else 0)


def _check_codestream(data: bytes) -> None:
    """Refuse JPEG 2000 that is cut off, or has bytes that packets cannot have."""
    if data.rfind(b"\xff\xd9") < 0:
        raise ValueError("its JPEG 2000 is cut off: it has no end marker")
    packets = data.find(b"\xff\x93")  # SOD, the start of data
    # A further SOT marker starts another tile-part, whose header may contain any bytes.
    several_parts = data.find(b"\xff\x90", packets) >= 0
    if packets >= 0 and not several_parts and _NOT_IN_PACKETS.search(data, packets):
        raise ValueError("its JPEG 2000 packets have invalid bytes")


_CHROMA = np.arange(256) - 128
_RED_OF_CR = np.rint(1.402 * _CHROMA).astype(np.int32)
_BLUE_OF_CB = np.rint(1.772 * _CHROMA).astype(np.int32)
_GREEN_OF_CB = np.rint(-0.34414 * 65536 * _CHROMA).astype(np.int32) + 32768
_GREEN_OF_CR = np.rint(-0.71414 * 65536 * _CHROMA).astype(np.int32)
"""Conversion of JFIF, with the rounding of OpenSlide, so that both readers return the same pixels."""


def _rgb_of_ycbcr(pixels: RGB) -> RGB:
    """Return RGB of YCbCr as libjpeg computes it, in whole numbers."""
    luma, cb, cr = pixels[..., 0].astype(np.int32), pixels[..., 1], pixels[..., 2]
    out: npt.NDArray[np.int32] = np.empty(pixels.shape, np.int32)
    out[..., 0] = luma + _RED_OF_CR[cr]
    out[..., 1] = luma + ((_GREEN_OF_CB[cb] + _GREEN_OF_CR[cr]) >> 16)
    out[..., 2] = luma + _BLUE_OF_CB[cb]
    return np.clip(out, 0, 255, out=out).astype(np.uint8)


def _over_white(pixels: npt.NDArray[np.uint8], alpha: int) -> RGB:
    """Return the colours blended over white."""
    colours = pixels[..., :3]
    if alpha not in (_ASSOCIATED, _UNASSOCIATED):
        return colours
    # 32 bits: in a file that wrongly declares associated alpha, colours may exceed their opacity, and sums 16 bits.
    opacity = pixels[..., 3:].astype(np.uint32)
    over = colours.astype(np.uint32) * (opacity if alpha == _UNASSOCIATED else 255) + (255 - opacity) * 255
    blended: RGB = np.minimum((over + 127) // 255, 255).astype(np.uint8)
    return blended
