"""Slides of an index file and the files that it names (https://openslide.org/formats/hamamatsu/): VMS and VMU.

```
a.vms          names the others           VMU: the same with two files of raw pixels, in columns:
a(0,0).jpg     the finest level, cut in   +----+----+----+
a(1,0).jpg     a grid of JPEGs with       | 1  | 2  | 3  |   all rows of 1, then all rows of 2 …
a_map.jpg      restart markers; a         +----+----+----+
               coarse level
```
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from pathology.readers.source_level import RGB

_RESTART_PX = 128
_MAP_FACTOR = 4
_COLUMN_PX = 50


def write_vms(path: Path, picture: RGB, grid: tuple[int, int] = (1, 2), mpp: float = 0.5, **more: str) -> Path:
    """Write ``NAME.vms`` and its JPEGs; sides of the picture are multiples of 128 px times the grid."""
    rows, columns = grid
    height, width = picture.shape[0] // rows, picture.shape[1] // columns
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _facts(picture, mpp) | {"NoJpegColumns": str(columns), "NoJpegRows": str(rows), "ImageFile": ""}
    for row in range(rows):
        for column in range(columns):
            name = f"{path.stem}({column},{row}).jpg"
            part = picture[row * height : (row + 1) * height, column * width : (column + 1) * width]
            (path.parent / name).write_bytes(_jpeg(part))
            lines["ImageFile" if row == column == 0 else f"ImageFile({column},{row})"] = name
    return _finish(path, "Virtual Microscope Specimen", lines, ".jpg", _jpeg(_coarse(picture)), more)


def write_vmu(path: Path, picture: RGB, mpp: float = 0.5, **more: str) -> Path:
    """Write ``NAME.vmu`` and its raw pixels; widths are multiples of 200 px."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / f"{path.stem}_image.ngr").write_bytes(_raw(picture))
    lines = _facts(picture, mpp) | {"BitsPerPixel": "36", "PixelOrder": "RGB", "ImageFile": f"{path.stem}_image.ngr"}
    return _finish(path, "Uncompressed Virtual Microscope Specimen", lines, ".ngr", _raw(_coarse(picture)), more)


def _facts(picture: RGB, mpp: float) -> dict[str, str]:
    height, width = picture.shape[:2]
    sizes = {"PhysicalWidth": str(round(width * mpp * 1000)), "PhysicalHeight": str(round(height * mpp * 1000))}
    return {"NoLayers": "1", "SourceLens": "20", **sizes}


def _finish(path: Path, group: str, lines: dict[str, str], suffix: str, coarse: bytes, more: dict[str, str]) -> Path:
    (path.parent / f"{path.stem}_map{suffix}").write_bytes(coarse)
    (path.parent / f"{path.stem}_macro.jpg").write_bytes(_jpeg(np.full((128, 256, 3), 180, np.uint8)))
    lines |= {"MapFile": f"{path.stem}_map{suffix}", "MacroImage": f"{path.stem}_macro.jpg", **more}
    path.write_text("\r\n".join([f"[{group}]", *(f"{key}={value}" for key, value in lines.items()), ""]))
    return path


def _coarse(picture: RGB) -> RGB:
    height, width = picture.shape[:2]
    blocks = picture.reshape(height // _MAP_FACTOR, _MAP_FACTOR, width // _MAP_FACTOR, _MAP_FACTOR, 3)
    return np.rint(blocks.mean((1, 3))).astype(np.uint8)


def _jpeg(picture: RGB) -> bytes:
    file = io.BytesIO()
    how = {"quality": 92, "subsampling": "4:4:4", "restart_marker_blocks": _RESTART_PX // 8}
    Image.fromarray(picture).save(file, "JPEG", **how)
    return file.getvalue()


def _raw(picture: RGB) -> bytes:
    """Return an NGR: 12 bits for each colour, column after column."""
    height, width = picture.shape[:2]
    columns = [picture[:, x : x + _COLUMN_PX].astype("<u2") << 4 for x in range(0, width, _COLUMN_PX)]
    head = b"GN" + bytes(2) + struct.pack("<iii", width, height, _COLUMN_PX) + bytes(8) + struct.pack("<i", 28)
    return head + b"".join(column.tobytes() for column in columns)
