"""Small MRXS slides, written as 3DHISTECH's scanners lay them out (https://openslide.org/formats/mirax/).

```
a.mrxs             a picture of the slide, which nobody needs
a/Slidedat.ini     the grid, the zoom levels, names of the files
  Index.dat        where the JPEG of each tile of each zoom level lies
  Data0000.dat …   the JPEGs, one after the other; where each photo was taken; macro and label pictures
```

The camera takes photos that may overlap, each cut into ``divisions²`` tiles. A coarser level joins 2 × 2 tiles of the
level before it edge to edge and halves them, whatever photos they are from:

```
photos on the slide         level 0, 2 divisions      level 1              level 2
+------+                    a b|c d                   [ab] | [cd]          [ab cd]
|    +-+----+               e f|g h                   [ef] | [gh]          [ef gh]
+----+-+    |
     +------+
```
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from pathology.readers.source_level import RGB

SLIDE_ID = "0123456789ABCDEF0123456789ABCDEF"
_PAGE_ENTRIES = 20
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mirax:
    """How a slide is laid out; places are (row, column), pixels (y, x).

    Attributes:
        grid: Photos that fit on the glass.
        scanned: Photos that were taken: (first row, first column, rows, columns).
        left_out: Photos inside of these that were not.
        tile_px: Side of a tile.
        divisions: A photo is ``divisions²`` tiles.
        overlap_px: What neighbouring photos share.
        shake_px: Photos are up to this far from where they should be, as their positions say; None: no positions.
        levels: Zoom levels, each half the one before.
        mpp: Microns per pixel (y, x) of the finest.
        fill: Colour of the glass where nothing was scanned (red, green, blue).
        files: How many data files the tiles are spread over.
        general: Further lines of the section GENERAL.
    """

    grid: Place = (10, 12)
    scanned: tuple[int, int, int, int] = (2, 3, 6, 7)
    left_out: Sequence[Place] = ()
    tile_px: int = 128
    divisions: int = 1
    overlap_px: int = 0
    shake_px: int | None = None
    levels: int = 4
    mpp: tuple[float, float] = (0.25, 0.25)
    fill: tuple[int, int, int] = (255, 255, 255)
    files: int = 3
    general: dict[str, str] = field(default_factory=dict)

    @property
    def photo_px(self) -> int:
        """Side of a photo."""
        return self.tile_px * self.divisions

    def photos(self) -> list[Place]:
        """Return the photos that were taken."""
        y, x, rows, columns = self.scanned
        places = [(y + i, x + j) for i in range(rows) for j in range(columns)]
        return [place for place in places if place not in set(self.left_out)]

    def position(self, place: Place) -> Place:
        """Return where (y, x) on the slide's finest level a photo lies."""
        step = self.photo_px - self.overlap_px
        y, x = place[0] * step, place[1] * step
        if self.shake_px is None:
            return y, x
        noise = np.random.default_rng(1000 * place[0] + place[1]).integers(-self.shake_px, self.shake_px + 1, 2)
        return y + int(noise[0]), x + int(noise[1])

    @property
    def size_px(self) -> Place:
        """(height, width) of the finest level, all of the glass."""
        step = self.photo_px - self.overlap_px
        return (self.grid[0] - 1) * step + self.photo_px, (self.grid[1] - 1) * step + self.photo_px

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """(y0, y1, x0, x1) of what was scanned."""
        corners = np.array([self.position(place) for place in self.photos()])
        (y0, x0), (y1, x1) = corners.min(0), corners.max(0) + self.photo_px
        return int(y0), int(y1), int(x0), int(x1)


def write_mirax(path: Path, picture: RGB, how: Mirax = Mirax()) -> Path:
    """Write a slide that shows ``picture``, of all the glass, where photos were taken.

    Args:
        path: ``NAME.mrxs``; the folder ``NAME`` is made beside it.
        picture: ``(*how.size_px, 3)`` uint8.
        how: The layout.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True)
    path.write_bytes(_jpeg(np.full((48, 64, 3), 200, np.uint8)))
    data = [bytearray(b"DATA" * 4) for _ in range(how.files)]
    mosaic, taken = _mosaic(picture, how)
    levels = [_put_level(data, mosaic, taken, level, how) for level in range(how.levels)]
    layers = [_put(data, 0, _jpeg(np.full((40, 60, 3), shade, np.uint8), b"label picture")) for shade in (180, 90)]
    if how.shake_px is not None:
        layers.append(_put(data, how.files - 1, _positions(how)))
    (folder / "Index.dat").write_bytes(_index(levels, layers))
    (folder / "Slidedat.ini").write_text(_slidedat(how), encoding="utf-8-sig", newline="\r\n")
    for number, content in enumerate(data):
        (folder / f"Data{number:04d}.dat").write_bytes(content)
    return path


Entry = tuple[int, int, int, int]
"""Number of a tile (or three zeros less), offset, length, file."""


def _mosaic(picture: RGB, how: Mirax) -> tuple[RGB, np.ndarray]:
    """Return all photos edge to edge, and which of the grid's tiles are of a photo that was taken."""
    side, rows, columns = how.photo_px, *how.grid
    mosaic: RGB = np.full((rows * side, columns * side, 3), how.fill, np.uint8)
    taken = np.zeros((rows * how.divisions, columns * how.divisions), bool)
    for row, column in how.photos():
        y, x = how.position((row, column))
        mosaic[row * side : (row + 1) * side, column * side : (column + 1) * side] = picture[y : y + side, x : x + side]
        d = how.divisions
        taken[row * d : (row + 1) * d, column * d : (column + 1) * d] = True
    return mosaic, taken


def _put_level(data: list[bytearray], mosaic: RGB, taken: np.ndarray, level: int, how: Mirax) -> list[Entry]:
    """Write the tiles of a zoom level and return where they lie."""
    joined, side = 2**level, how.tile_px
    span = joined * side
    found = []
    for row in range(0, taken.shape[0], joined):
        for column in range(0, taken.shape[1], joined):
            if not taken[row : row + joined, column : column + joined].any():
                continue
            part = mosaic[row * side : row * side + span, column * side : column * side + span]
            tile: RGB = np.full((span, span, 3), how.fill, np.uint8)
            tile[: part.shape[0], : part.shape[1]] = part
            small = tile.reshape(side, joined, side, joined, 3).mean((1, 3))
            offset, length, file = _put(data, len(found) % how.files, _jpeg(np.rint(small).astype(np.uint8)))
            found.append((row * taken.shape[1] + column, offset, length, file))
    return found


def _put(data: list[bytearray], file: int, content: bytes) -> tuple[int, int, int]:
    data[file].extend(content)
    return len(data[file]) - len(content), len(content), file


def _jpeg(tile: RGB, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    Image.fromarray(tile).save(file, "JPEG", quality=92, subsampling=0, comment=comment)
    return file.getvalue()


def _positions(how: Mirax) -> bytes:
    """One record for each photo that the glass has room for: a flag, x, y."""
    taken = set(how.photos())
    places = [(row, column) for row in range(how.grid[0]) for column in range(how.grid[1])]
    found = [(how.position(place) if place in taken else (0, 0)) for place in places]
    return b"".join(struct.pack("<bii", place in taken, x, y) for place, (y, x) in zip(places, found, strict=True))


def _index(levels: list[list[Entry]], layers: list[tuple[int, int, int]]) -> bytes:
    """Two roots; behind each a table of lists; a list is a chain of pages."""
    body = bytearray(b"01.02" + SLIDE_ID.encode() + bytes(8))

    def put(*numbers: int) -> int:
        body.extend(struct.pack(f"<{len(numbers)}i", *numbers))
        return len(body) - 4 * len(numbers)

    def pages(entries: list[Entry]) -> int:
        """One page right behind the other: readers go on reading, and only look whether there is a next one."""
        first = 0
        for k in range(0, len(entries), _PAGE_ENTRIES):
            page = [number for entry in entries[k : k + _PAGE_ENTRIES] for number in entry]
            following = len(body) + 4 * (2 + len(page)) if k + _PAGE_ENTRIES < len(entries) else 0
            first = min(first or len(body), put(len(page) // 4, following, *page))
        return put(0, first)

    def layer(offset: int, length: int, file: int) -> int:
        return put(0, put(1, 0, 0, 0, offset, length, file))

    roots = [put(*[pages(entries) for entries in levels]), put(*[layer(*entry) for entry in layers])]
    body[5 + len(SLIDE_ID) : 13 + len(SLIDE_ID)] = struct.pack("<2i", *roots)
    return bytes(body)


def _slidedat(how: Mirax) -> str:
    red, green, blue = how.fill
    rows, columns = (count * how.divisions for count in how.grid)
    general = {
        "SLIDE_VERSION": "01.02",
        "SLIDE_ID": SLIDE_ID,
        "IMAGENUMBER_X": columns,
        "IMAGENUMBER_Y": rows,
        "OBJECTIVE_MAGNIFICATION": 40,
        "CameraImageDivisionsPerSide": how.divisions,
        **how.general,
    }
    layers = {
        "NONHIER_COUNT": 1 if how.shake_px is None else 2,
        "NONHIER_0_NAME": "Scan data layer",
        "NONHIER_0_COUNT": 2,
        "NONHIER_0_SECTION": "NONHIERLAYER_0_SECTION",
        "NONHIER_0_VAL_0": "ScanDataLayer_SlideThumbnail",
        "NONHIER_0_VAL_0_SECTION": "NONHIERLAYER_0_LEVEL_0_SECTION",
        "NONHIER_0_VAL_1": "ScanDataLayer_SlideBarcode",
        "NONHIER_0_VAL_1_SECTION": "NONHIERLAYER_0_LEVEL_1_SECTION",
    }
    if how.shake_px is not None:
        layers |= {"NONHIER_1_NAME": "VIMSLIDE_POSITION_BUFFER", "NONHIER_1_COUNT": 1}
        layers |= {"NONHIER_1_VAL_0": "default", "NONHIER_1_VAL_0_SECTION": "NONHIERLAYER_1_LEVEL_0_SECTION"}
    zoom = {"HIER_COUNT": 1, **layers, "INDEXFILE": "Index.dat", "HIER_0_NAME": "Slide zoom level"}
    zoom |= {"HIER_0_COUNT": how.levels}
    for k in range(how.levels):
        zoom |= {f"HIER_0_VAL_{k}": f"ZoomLevel_{k}", f"HIER_0_VAL_{k}_SECTION": f"LAYER_0_LEVEL_{k}_SECTION"}
    sections: dict[str, dict[str, object]] = {"GENERAL": general, "HIERARCHICAL": zoom}
    sections["DATAFILE"] = {"FILE_COUNT": how.files, **{f"FILE_{k}": f"Data{k:04d}.dat" for k in range(how.files)}}
    for k in range(how.levels):
        sections[f"LAYER_0_LEVEL_{k}_SECTION"] = {
            "OVERLAP_X": how.overlap_px / 2**k,
            "OVERLAP_Y": how.overlap_px / 2**k,
            "MICROMETER_PER_PIXEL_X": how.mpp[1] * 2**k,
            "MICROMETER_PER_PIXEL_Y": how.mpp[0] * 2**k,
            "IMAGE_FORMAT": "JPEG",
            "IMAGE_FILL_COLOR_BGR": blue << 16 | green << 8 | red,
            "DIGITIZER_WIDTH": how.tile_px,
            "DIGITIZER_HEIGHT": how.tile_px,
            "IMAGE_CONCAT_FACTOR": 0 if k == 0 else 1,
        }
    sections["NONHIERLAYER_0_LEVEL_0_SECTION"] = {"THUMBNAIL_IMAGE_TYPE": "JPEG"}
    sections["NONHIERLAYER_0_LEVEL_1_SECTION"] = {"BARCODE_IMAGE_TYPE": "JPEG"}
    texts = ["\n".join([f"[{name}]", *(f"{k} = {v}" for k, v in keys.items()), ""]) for name, keys in sections.items()]
    return "\n".join(texts)
