"""The colour space that a JPEG 2000 tile states: in its codestream, and in boxes if it is a JP2 file.

```
jP  ftyp  jp2h { ihdr  colr: 16 sRGB, 17 grey, 18 sYCC, or an ICC profile }  jp2c { codestream }
                                                                             SOC  SIZ: components and their sizes
                                                                                  COD: the transform between them
```

Sources: ISO/IEC 15444-1, A.5.1 (SIZ), A.6.1 (COD), I.4 and I.5.3.3 (boxes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_JP2_START = b"\x00\x00\x00\x0cjP  "
_CODESTREAM_START = b"\xff\x4f\xff\x51"
_COD, _SOT = 0x52, 0x90
_SRGB = 16
_ENUMERATED = {_SRGB: "rgb", 17: "grey", 18: "ycbcr", 0: "", 12: "CMYK", 14: "CIELab", 24: "e-sYCC"}


@dataclass(frozen=True, slots=True)
class CodestreamHeader:
    """Statements of a tile about its colours.

    Attributes:
        own_transform: Whether the codestream has a colour transform: decoders then return RGB.
        subsampled: Whether its second component has fewer columns than the first, as only chroma has; imagecodecs
            returns RGB for such tiles.
        box: Colour space in the box of a JP2 file: ``rgb``, ``ycbcr``, ``grey`` or another name; empty if there is no
            box, or it states none.
    """

    own_transform: bool
    subsampled: bool
    box: str = ""

    @property
    def says(self) -> str:
        """``rgb`` or ``ycbcr``; empty if it says neither, or its codestream contradicts its box."""
        return "" if self.contradicts else self._stream or self._box

    @property
    def contradicts(self) -> bool:
        """Whether one of codestream and box says RGB, and the other YCbCr."""
        return bool(self._stream and self._box and self._stream != self._box)

    @property
    def described(self) -> str:
        """What it says, after "its JPEG 2000 tiles"; empty if nothing."""
        names = {"rgb": "RGB", "ycbcr": "YCbCr"}
        claims = [f"say {names.get(self.box, self.box)} in their colour box"] if self.box else []
        claims += ["have a colour transform of their own"] if self.own_transform else []
        return " and ".join(claims + (["have fewer columns of chroma"] if self.subsampled else []))

    @property
    def _stream(self) -> str:
        """``rgb`` or ``ycbcr`` as the codestream says; empty if it says neither."""
        if self.own_transform:
            return "rgb"
        return "ycbcr" if self.subsampled else ""

    @property
    def _box(self) -> str:
        """``rgb`` or ``ycbcr`` as the box says; empty if it says neither."""
        return self.box if self.box in ("rgb", "ycbcr") else ""


def jpeg_2000_header(tile: bytes) -> CodestreamHeader | None:
    """Return what a tile says about its colours; None if it is damaged."""
    start, colour = _codestream(tile)
    try:
        return CodestreamHeader(_has_transform(tile, start), is_subsampled(tile, start), _colour_of(tile, colour))
    except (IndexError, ValueError):
        return None


def is_jp2(tile: bytes) -> bool:
    """Whether a tile is a JP2 file, not a bare codestream."""
    return tile.startswith(_JP2_START)


def codestream_of(tile: bytes) -> bytes:
    """Return the codestream of a tile; ``tile`` itself if it is one."""
    return tile[_codestream(tile)[0] :] if is_jp2(tile) else tile


def is_subsampled(codestream: bytes, start: int = 0) -> bool:
    """Whether a codestream's second component has fewer columns than its first; see `CodestreamHeader`."""
    # SIZ: the number of components at byte 40, then three bytes for each; the second is its column step.
    several = codestream[start + 40 : start + 42] != b"\0\1"
    return several and codestream[start + 43] < codestream[start + 46]


def without_colour(tile: bytes) -> bytes:
    """Return a tile with sRGB in its colour box, whatever this stated: decoders then return its components as stored.

    Decoders still convert subsampled components, and apply the palette and the order of channels that other boxes
    state. A tile without a number of a colour space is returned unchanged.
    """
    at = _codestream(tile)[1] if is_jp2(tile) else 0
    # Content of the box: method (1: the colour space has a number), precedence and approximation, a byte each, then
    # the number.
    enumerated = at > 0 and tile[at : at + 1] == b"\1"
    return tile[: at + 3] + _SRGB.to_bytes(4, "big") + tile[at + 7 :] if enumerated else tile


def _has_transform(tile: bytes, start: int) -> bool:
    """Whether a codestream that begins at ``start`` uses the multiple component transform.

    Raises:
        ValueError: It is damaged.
    """
    if tile[start : start + 4] != _CODESTREAM_START:
        raise ValueError("it has no codestream")
    # After SOC (2 bytes, no length), segments follow up to SOT, the first tile-part.
    at = start + 2
    while tile[at + 1] != _SOT:
        if tile[at] != 0xFF:
            raise ValueError("its main header is damaged")
        if tile[at + 1] == _COD:
            return tile[at + 8] == 1  # the multiple component transform
        at += 2 + int.from_bytes(tile[at + 2 : at + 4], "big")
    return False


def _colour_of(tile: bytes, at: int) -> str:
    if not at or tile[at] != 1:  # an ICC profile
        return ""
    number = int.from_bytes(tile[at + 3 : at + 7], "big")
    return _ENUMERATED.get(number, f"colour space {number}")


def _codestream(tile: bytes) -> tuple[int, int]:
    """Return (offset of the codestream, or the tile's end; offset of the first colour box's content, or 0)."""
    if not is_jp2(tile):
        return 0, 0
    colour = 0
    for kind, start, end in _boxes(tile, 0, len(tile)):
        if kind == b"jp2h":
            colour = next((at for inner, at, _ in _boxes(tile, start, end) if inner == b"colr"), 0)
        if kind == b"jp2c":
            return start, colour
    return len(tile), colour


def _boxes(tile: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of the contents of boxes."""
    while at + 8 <= end:
        length, kind, head = int.from_bytes(tile[at : at + 4], "big"), tile[at + 4 : at + 8], 8
        # ISO/IEC 15444-1, annex I: length 1 means that 64 bits of length follow the kind, 0 means up to the end.
        if length == 1:
            length, head = int.from_bytes(tile[at + 8 : at + 16], "big"), 16
        stop = end if length == 0 else at + length
        # A box shorter than its head is damaged, and would make this loop endless.
        if stop < at + head:
            return
        yield kind, at + head, min(stop, end)
        at = stop
