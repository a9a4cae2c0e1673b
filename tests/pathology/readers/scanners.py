"""Slides as scanners write them: tiles encoded by hand, so that tables, colours and gaps are those of real files."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile
from PIL import Image

from pathology.readers.source_level import RGB

Encode = Callable[[RGB], bytes]
APERIO = "Aperio Image Library v11.2.1\r\n{w}x{h} ({tile}x{tile}) JPEG/RGB Q=70|AppMag = 40|MPP = 0,2528"


def smooth(height: int, width: int, seed: int = 0) -> RGB:
    """Return a picture with colours and edges that survives JPEG."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).copy()


def soft(height: int, width: int, seed: int = 0) -> RGB:
    """Return a picture with shapes of 64 px, of which coarse levels show something, too."""
    small = Image.fromarray(smooth(-(-height // 4), -(-width // 4), seed))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).copy()


def jpeg(tile: RGB, stored: str, subsampling: str = "4:2:0", quality: int = 80) -> bytes:
    """Return a JPEG with components 1, 2, 3 that hold RGB or YCbCr, as ``stored`` says, and no word about which."""
    file = io.BytesIO()
    picture = (
        Image.fromarray(tile) if stored == "ycbcr" else Image.frombytes("YCbCr", tile.shape[1::-1], tile.tobytes())
    )
    picture.save(file, "JPEG", quality=quality, subsampling=subsampling)
    segments, scan = split(file.getvalue())
    return b"\xff\xd8" + b"".join(s for s in segments if s[1] != 0xE0) + scan


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the segments between start and scan, and the scan with what follows."""
    segments, at = [], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append(data[at:end])
        at = end
    return segments, data[at:]


def abbreviated(data: bytes) -> tuple[bytes, bytes]:
    """Return (tables, tile): quantisation and Huffman tables apart, as in the tag JPEGTables."""
    segments, scan = split(data)
    tables = [s for s in segments if s[1] in (0xDB, 0xC4)]
    rest = [s for s in segments if s[1] not in (0xDB, 0xC4)]
    return b"\xff\xd8" + b"".join(tables) + b"\xff\xd9", b"\xff\xd8" + b"".join(rest) + scan


def tiles_of(image: RGB, tile_px: int) -> Iterator[RGB]:
    """Yield tiles row by row; those at the edge are filled up with the last pixels."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((0, -height % tile_px), (0, -width % tile_px), (0, 0)), mode="edge")
    for y in range(0, height, tile_px):
        for x in range(0, width, tile_px):
            yield np.ascontiguousarray(padded[y : y + tile_px, x : x + tile_px])


def write_encoded(
    path: Path,
    images: list[RGB],
    encode: Encode,
    compression: int | str,
    photometric: str,
    tile_px: int = 128,
    tables: bytes | None = None,
    aperio: bool = True,
    **tags: object,
) -> Path:
    """Write a pyramid of tiles that ``encode`` makes; an Aperio SVS, or a generic TIFF."""
    with tifffile.TiffWriter(path) as tiff:
        for level, image in enumerate(images):
            height, width = image.shape[:2]
            tiff.write(
                iter([encode(tile) for tile in tiles_of(image, tile_px)]),
                shape=image.shape,
                dtype=np.uint8,
                tile=(tile_px, tile_px),
                compression=compression,
                photometric=photometric,
                jpegtables=tables,
                subfiletype=1 if level and not aperio else 0,
                description=APERIO.format(w=width, h=height, tile=tile_px) if aperio else None,
                metadata=None,
                **tags,
            )
    return path


def jpeg_2000(tile: RGB, ycbcr: bool) -> bytes:
    """Return a JPEG 2000 codestream without a colour transform of its own where ``ycbcr``."""
    stored = np.asarray(Image.fromarray(tile).convert("YCbCr")) if ycbcr else tile
    return bytes(imagecodecs.jpeg2k_encode(stored, level=45, codecformat="j2k", mct=not ycbcr))


def leave_out(path: Path, page: int, index: int) -> Path:
    """Set a tile's byte count to 0: the scanner did not write it."""
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tag = tiff.pages[page].tags["TileByteCounts"]
        counts = list(tag.value)
        counts[index] = 0
        tag.overwrite(counts)
    return path


def write_leica(path: Path, image: RGB, corner: tuple[int, int], collection: tuple[int, int]) -> Path:
    """Write an SCN whose one scanned area stands at ``corner`` (y, x) of a larger glass, so that it has bounds."""
    height, width = image.shape[:2]
    nm = 500
    small = np.full((collection[0] // 16, collection[1] // 16, 3), 230, np.uint8)

    def element(name: str, size: tuple[int, int], view: tuple[int, int, int, int], ifd: int, power: int) -> str:
        h, w, y, x = (v * nm for v in view)
        return f"""<image name="{name}" uuid="{name}"><creationDate>2020-01-01T00:00:00Z</creationDate>
        <device model="Leica SCN400;Leica SCN" version="1.4"/>
        <pixels sizeX="{size[1]}" sizeY="{size[0]}"><dimension sizeX="{size[1]}" sizeY="{size[0]}" r="0" ifd="{ifd}"/>
        </pixels><view sizeX="{w}" sizeY="{h}" offsetX="{x}" offsetY="{y}" spacingZ="0"/>
        <scanSettings><objectiveSettings><objective>{power}</objective></objectiveSettings>
        <illuminationSettings><numericalAperture>0.5</numericalAperture>
        <illuminationSource>brightfield</illuminationSource></illuminationSettings></scanSettings></image>"""

    macro = element("macro", small.shape[:2], (*collection, 0, 0), 0, 1)
    main = element("main", (height, width), (height, width, *corner), 1, 20)
    xml = f"""<?xml version="1.0"?><scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01" uuid="u">
    <collection name="c" uuid="c" sizeX="{collection[1] * nm}" sizeY="{collection[0] * nm}">{macro}{main}</collection>
    </scn>"""
    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        for k, picture in enumerate((small, image)):
            tiff.write(
                iter([jpeg(tile, "ycbcr") for tile in tiles_of(picture, 512)]),
                shape=picture.shape,
                dtype=np.uint8,
                tile=(512, 512),
                compression="jpeg",
                photometric="ycbcr",
                subsampling=(2, 2),
                resolution=(1e7 / nm, 1e7 / nm),
                resolutionunit="CENTIMETER",
                description=xml if k == 0 else None,
                metadata=None,
            )
    return path


def restarts_of(data: bytes) -> list[int]:
    """Return where the scan's first byte and those after each restart marker stand in a JPEG."""
    at = len(data) - len(split(data)[1])
    at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    starts = [at]
    while data[(at := data.index(b"\xff", at)) + 1] != 0xD9:
        starts += [at + 2] if 0xD0 <= data[at + 1] <= 0xD7 else []
        at += 2
    return starts


def write_ndpi(path: Path, images: list[RGB], block_px: int = 256, subsampling: str = "4:2:2") -> Path:
    """Write an NDPI: one JPEG with restart markers for each level, in a TIFF whose directories have 64-bit links."""
    body = bytearray(b"II*\0" + bytes(8))
    link = 4

    def put(data: bytes) -> int:
        body.extend(b"\0" * (len(body) % 2))
        body.extend(data)
        return len(body) - len(data)

    for image in images:
        file = io.BytesIO()
        how = {"subsampling": subsampling, "restart_marker_blocks": block_px // (8 if subsampling == "4:4:4" else 16)}
        Image.fromarray(image).save(file, "JPEG", quality=80, **how)
        jpeg_at, starts = put(file.getvalue()), restarts_of(file.getvalue())
        factor = images[0].shape[1] / image.shape[1]
        per_cm = put(struct.pack("<II", round(40_000 / factor), 1))
        short, long, text, real, signed = 3, 4, 2, 11, 9
        entries = [
            (254, long, 1, struct.pack("<I", 0)),
            (256, long, 1, struct.pack("<I", image.shape[1])),
            (257, long, 1, struct.pack("<I", image.shape[0])),
            (258, short, 3, struct.pack("<I", put(struct.pack("<3H", 8, 8, 8)))),
            (259, short, 1, struct.pack("<H", 7)),
            (262, short, 1, struct.pack("<H", 6)),
            (271, text, 10, struct.pack("<I", put(b"Hamamatsu\0"))),
            (272, text, 11, struct.pack("<I", put(b"NanoZoomer\0"))),
            (273, long, 1, struct.pack("<I", jpeg_at)),
            (277, short, 1, struct.pack("<H", 3)),
            (278, long, 1, struct.pack("<I", image.shape[0])),
            (279, long, 1, struct.pack("<I", len(file.getvalue()))),
            (282, 5, 1, struct.pack("<I", per_cm)),
            (283, 5, 1, struct.pack("<I", per_cm)),
            (284, short, 1, struct.pack("<H", 1)),
            (296, short, 1, struct.pack("<H", 3)),
            (65420, long, 1, struct.pack("<I", 1)),
            (65421, real, 1, struct.pack("<f", 40 / factor)),
            (65422, signed, 1, bytes(4)),
            (65423, signed, 1, bytes(4)),
            (65424, signed, 1, bytes(4)),
            (65426, long, len(starts), struct.pack("<I", put(struct.pack(f"<{len(starts)}I", *starts)))),
            (65427, text, 5, struct.pack("<I", put(b"made\0"))),
        ]
        directory = put(struct.pack("<H", len(entries)))
        body[link : link + 8] = struct.pack("<Q", directory)
        for tag, kind, count, value in entries:
            body.extend(struct.pack("<HHI", tag, kind, count) + value.ljust(4, b"\0"))
        link = len(body)
        body.extend(bytes(8 + 4 * len(entries)))  # no further one; then the high halves of the values
    path.write_bytes(bytes(body))
    return path
