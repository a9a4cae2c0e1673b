"""Small CZI slides of two scenes, as Zeiss' scanners lay them out (https://openslide.org/formats/zeiss/).

A file is a chain of segments: 16 bytes of name, room, size, content. The first says where three lists stand: of blocks
of pixels (each knows its place on the slide, its size there and its stored size), of attachments, and the XML.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import imagecodecs
import numpy as np
from PIL import Image

from pathology.readers.source_level import RGB
from tests.pathology.tiffs import halved

_BGR24 = 3
_GUID = bytes(range(16))
_ENCODERS: dict[str, tuple[int, Callable[[RGB], bytes]]] = {
    "none": (0, lambda tile: tile[..., ::-1].tobytes()),
    "jpegxr": (4, lambda tile: bytes(imagecodecs.jpegxr_encode(tile, level=0.95, photometric="rgb"))),
    "zstd": (5, lambda tile: bytes(imagecodecs.zstd_encode(tile[..., ::-1].tobytes(), level=1))),
}


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of pixels: scene, rank in the pile, place and size on the slide in finest pixels, where it is stored."""

    scene: int
    order: int
    y: int
    x: int
    height: int
    width: int
    factor: int
    position: int


def write_czi(
    path: Path,
    picture: RGB,
    scenes: list[tuple[int, int, int, int]],
    codec: str = "zstd",
    levels: int = 3,
    tile_px: int = 256,
    mpp: float = 0.25,
    origin: tuple[int, int] = (-500, 3000),
    person: str = "Nobody",
    order: tuple[int, ...] | None = None,
    changed: Mapping[int, Callable[[RGB], RGB]] | None = None,
) -> Path:
    """Write a slide.

    Args:
        path: ``NAME.czi``.
        picture: ``(h, w, 3)`` uint8 of all scenes together and what is between them.
        scenes: (y0, y1, x0, x1) of each in the picture, multiples of the coarsest factor.
        codec: ``none``, ``zstd`` or ``jpegxr``.
        levels: Each half the one before.
        tile_px: Side of a block as it is stored.
        mpp: Microns per pixel.
        origin: (y, x) of the picture in the scanner's pixels.
        person: Stands in the XML and in a label picture.
        order: Ranks of the scenes, which overlap then; every second one is shown as a negative.
        changed: What makes other pixels of those of a level.
    """
    kind, encode = _ENCODERS[codec]
    body, blocks = bytearray(_segment("ZISRAWFILE", bytes(512))), []
    for level in range(levels):
        for number, (y0, y1, x0, x1) in enumerate(scenes):
            factor = 2**level
            part = picture[y0 // factor : y1 // factor, x0 // factor : x1 // factor]
            part = (changed or {}).get(level, lambda same: same)(part)
            for y in range(0, part.shape[0], tile_px):
                for x in range(0, part.shape[1], tile_px):
                    tile = np.ascontiguousarray(part[y : y + tile_px, x : x + tile_px])
                    tile = 255 - tile if order and number % 2 else tile
                    place = (y0 + y * factor + origin[0], x0 + x * factor + origin[1])
                    block = StoredBlock(
                        number,
                        order[number] if order else 0,
                        *place,
                        *(side * factor for side in tile.shape[:2]),
                        factor,
                        len(body),
                    )
                    blocks.append(block)
                    body += _pixels(block, kind, encode(tile))
        picture = halved(picture)
    height, width = max(s[1] for s in scenes) - min(s[0] for s in scenes), max(s[3] for s in scenes)
    listed = b"".join(_entry(block, kind) for block in blocks)
    places = [len(body)]
    body += _segment("ZISRAWDIRECTORY", struct.pack("<i124x", len(blocks)) + listed)
    places.append(len(body))
    xml = _xml((height, width - min(s[2] for s in scenes)), len(scenes), mpp, person).encode()
    body += _segment("ZISRAWMETADATA", struct.pack("<ii248x", len(xml), 0) + xml)
    body += _label(len(body), person, places)
    head = struct.pack("<iiii16s16siqqiq", 1, 0, 0, 0, _GUID, _GUID, 0, places[0], places[1], 0, places[2])
    body[32 : 32 + len(head)] = head
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def _segment(name: str, content: bytes) -> bytes:
    room = content + bytes(-len(content) % 32)
    return struct.pack("<16sqq", name.encode(), len(room), len(content)) + room


def _entry(block: StoredBlock, kind: int) -> bytes:
    sizes = {"X": (block.x, block.width), "Y": (block.y, block.height)}
    dimensions = [(name, start, size, size // block.factor) for name, (start, size) in sizes.items()]
    dimensions += [("C", 0, 1, 1), ("S", block.scene, 1, 1), ("M", block.order, 1, 1)]
    listed = b"".join(struct.pack("<4siifi", n.encode(), start, size, 0.0, kept) for n, start, size, kept in dimensions)
    pyramid = 0 if block.factor == 1 else 2
    return struct.pack("<2siqiib5xi", b"DV", _BGR24, block.position, 0, kind, pyramid, len(dimensions)) + listed


def _pixels(block: StoredBlock, kind: int, data: bytes) -> bytes:
    head = struct.pack("<iiq", 0, 0, len(data)) + _entry(block, kind)
    return _segment("ZISRAWSUBBLOCK", head.ljust(256, b"\0") + data)


def _label(at: int, person: str, places: list[int]) -> bytes:
    """Return the label picture and the list of attachments, and note where that stands."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "JPEG", comment=person.encode())
    entry = struct.pack("<2s10sqi16s8s80s", b"A1", b"", at, 0, _GUID, b"JPG", b"Label")
    head = struct.pack("<i12x", len(file.getvalue())) + entry
    picture = _segment("ZISRAWATTACH", head.ljust(256, b"\0") + file.getvalue())
    places.append(at + len(picture))
    return picture + _segment("ZISRAWATTDIR", struct.pack("<i252x", 1) + entry)


def _xml(size: tuple[int, int], scenes: int, mpp: float, person: str) -> str:
    distances = "".join(f'<Distance Id="{axis}"><Value>{mpp * 1e-6!r}</Value></Distance>' for axis in "XY")
    image = f"<SizeX>{size[1]}</SizeX><SizeY>{size[0]}</SizeY><SizeS>{scenes}</SizeS>"
    image += '<ObjectiveSettings><ObjectiveRef Id="Objective:1"/></ObjectiveSettings>'
    lens = '<Objective Id="Objective:1"><NominalMagnification>40</NominalMagnification></Objective>'
    return (
        f"<ImageDocument><Metadata><Information><User><DisplayName>{person}</DisplayName></User><Document><Name>{person}"
        f"</Name></Document><Image>{image}</Image><Instrument><Objectives>{lens}</Objectives></Instrument></Information>"
        f"<Scaling><Items>{distances}</Items></Scaling></Metadata></ImageDocument>"
    )
