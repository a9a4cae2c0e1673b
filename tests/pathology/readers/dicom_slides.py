"""Small DICOM slides (PS3.3 A.32.8, VL Whole Slide Microscopy): a file for each level, frames of JPEG, full tiling."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from pathology.readers.source_level import RGB
from tests.pathology.readers.scanners import tiles_of
from tests.pathology.tiffs import halved

WHOLE_SLIDE, CT = "1.2.840.10008.5.1.4.1.1.77.1.6", "1.2.840.10008.5.1.4.1.1.2"
_JPEG_BASELINE = "1.2.840.10008.1.2.4.50"
_LONG = ("OB", "SQ", "UN")
_UNDEFINED = 0xFFFFFFFF


def element(tag: int, kind: str, value: bytes | str | int | list[bytes]) -> bytes:
    """Return an element, explicit little endian; a list is a sequence of items of undefined length."""
    if isinstance(value, list):
        items = b"".join(_tag(0xFFFEE000, _UNDEFINED) + item + _tag(0xFFFEE00D, 0) for item in value)
        return _head(tag, kind, _UNDEFINED) + items + _tag(0xFFFEE0DD, 0)
    if isinstance(value, int):
        value = struct.pack("<H" if kind == "US" else "<I", value)
    if isinstance(value, str):
        value = value.encode() + (b"\0" if kind == "UI" else b" ") * (len(value) % 2)
    return _head(tag, kind, len(value)) + value


def _head(tag: int, kind: str, length: int) -> bytes:
    start = struct.pack("<HH", tag >> 16, tag & 0xFFFF) + kind.encode()
    return start + (struct.pack("<xxI", length) if kind in _LONG else struct.pack("<H", length))


def _tag(tag: int, length: int) -> bytes:
    return struct.pack("<HHI", tag >> 16, tag & 0xFFFF, length)


def write_file(
    path: Path,
    picture: RGB,
    uid: str,
    series: str,
    *,
    image_type: str = "ORIGINAL\\PRIMARY\\VOLUME\\NONE",
    mpp: float = 0.5,
    tile_px: int = 128,
    sop_class: str = WHOLE_SLIDE,
    patient: str = "Nobody",
    day: str = "20200101",
    focal_planes: int = 1,
    photometric: str = "YBR_FULL_422",
    syntax: str = _JPEG_BASELINE,
    encode: Callable[[RGB], bytes] | None = None,
    organisation: str = "TILED_FULL",
    positions: list[tuple[int, int] | None] | None = None,
) -> Path:
    """Write one file of a series: a level, a label, or a picture of another kind.

    ``positions``: the stated (column, row) of each frame, from 1; None for a frame without one.
    """
    height, width = picture.shape[:2]
    frames = [_even((encode or _jpeg)(tile)) for tile in tiles_of(picture, tile_px)]
    meta = element(0x00020001, "OB", b"\0\1") + element(0x00020002, "UI", sop_class)
    meta += element(0x00020003, "UI", uid) + element(0x00020010, "UI", syntax)
    meta += element(0x00020012, "UI", "1.2.3.4")
    spacing = element(0x00280030, "DS", f"{mpp / 1000:.6f}\\{mpp / 1000:.6f}")
    head = [
        element(0x00080008, "CS", image_type),
        element(0x00080016, "UI", sop_class),
        element(0x00080018, "UI", uid),
        element(0x00080020, "DA", day),
        # Another series, named inside of a sequence: not this file's.
        element(0x00081115, "SQ", [element(0x0020000E, "UI", "9.9.9")]),
        element(0x00100010, "PN", patient),
        element(0x0020000D, "UI", "1.2.3"),
        element(0x0020000E, "UI", series),
        element(0x00209311, "CS", organisation),
        element(0x00280002, "US", 3),
        element(0x00280004, "CS", photometric),
        element(0x00280006, "US", 0),
        element(0x00280008, "IS", str(len(frames))),
        element(0x00280010, "US", tile_px),
        element(0x00280011, "US", tile_px),
        element(0x00280100, "US", 8),
        element(0x00280101, "US", 8),
        element(0x00280102, "US", 7),
        element(0x00280103, "US", 0),
        element(0x00480006, "UL", width),
        element(0x00480007, "UL", height),
        *([element(0x00480303, "UL", focal_planes)] if focal_planes > 1 else []),
        element(0x00480105, "SQ", [element(0x00480112, "DS", "20")]),
        element(0x52009229, "SQ", [element(0x00289110, "SQ", [spacing])]),
        *([] if positions is None else [element(0x52009230, "SQ", [_placed(at) for at in positions])]),
    ]
    body = b"".join(head) + _head(0x7FE00010, "OB", _UNDEFINED) + _tag(0xFFFEE000, 0)
    body += b"".join(_tag(0xFFFEE000, len(frame)) + frame for frame in frames) + _tag(0xFFFEE0DD, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(128) + b"DICM" + element(0x00020000, "UL", len(meta)) + meta + body)
    return path


def _placed(at: tuple[int, int] | None) -> bytes:
    """Return the functional groups of a frame."""
    if at is None:
        return b""
    column, row = (element(0x0048021E + k, "SL", struct.pack("<i", value)) for k, value in enumerate(at))
    return element(0x0048021A, "SQ", [column + row])


def write_series(folder: Path, name: str, picture: RGB, series: str, levels: int = 3, **how: object) -> list[Path]:
    """Write ``NAME-0.dcm``, ``NAME-1.dcm`` … each half the one before, and ``NAME-label.dcm``; return all."""
    small = np.full((64, 64, 3), 200, np.uint8)
    label = {"image_type": "ORIGINAL\\PRIMARY\\LABEL\\NONE", "tile_px": 64, **how}
    files = [write_file(folder / f"{name}-label.dcm", small, f"{series}.9", series, **label)]  # type: ignore[arg-type]
    for level in range(levels):
        derived = {"image_type": "DERIVED\\PRIMARY\\VOLUME\\RESAMPLED"} if level else {}
        file = folder / f"{name}-{level}.dcm"
        files.append(
            write_file(file, picture, f"{series}.{level}", series, mpp=0.5 * 2**level, **derived, **how)  # type: ignore[arg-type]
        )
        picture = halved(picture)
    return files


def _jpeg(tile: RGB) -> bytes:
    file = io.BytesIO()
    Image.fromarray(tile).save(file, "JPEG", quality=92, subsampling="4:2:2")
    return file.getvalue()


def _even(frame: bytes) -> bytes:
    return frame + b"\0" * (len(frame) % 2)
