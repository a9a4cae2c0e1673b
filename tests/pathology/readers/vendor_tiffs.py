"""TIFFs that OpenSlide reads by their XML: Philips and Ventana (https://openslide.org/formats/philips/, /ventana/)."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

from pathology.readers.source_level import RGB
from tests.pathology.readers.scanners import jpeg, leave_out, tiles_of
from tests.pathology.tiffs import halved


def write_philips(
    path: Path,
    picture: RGB,
    levels: int = 3,
    mpp: float = 0.25,
    tile_px: int = 128,
    left_out: Sequence[int] = (),
    patient: str = "Nobody",
) -> Path:
    """Write a Philips TIFF: each level filled up to whole tiles, its true size only in the pixel spacing.

    Args:
        path: ``NAME.tiff``.
        picture: ``(h, w, 3)`` uint8 of whole tiles.
        levels: Each half the one before.
        mpp: Microns per pixel of the finest.
        tile_px: Side of a tile.
        left_out: Tiles of the finest level that were not scanned, by number.
        patient: Stands in the XML, and in a label picture there.
    """
    xml = _philips_xml([mpp / 1000 * 2**k for k in range(levels)], patient)
    with tifffile.TiffWriter(path) as tiff:
        for level in range(levels):
            height, width = (-(-side // tile_px) * tile_px for side in picture.shape[:2])
            tiff.write(
                iter([jpeg(tile, "ycbcr", quality=92) for tile in tiles_of(picture, tile_px)]),
                shape=(height, width, 3),
                description=None if level else xml,
                software=None if level else "Philips DP v1.0",
                subfiletype=1 if level else 0,
                **_how(tile_px),
            )
            picture = halved(picture if level else _without(picture, left_out, tile_px))
    for number in left_out:
        leave_out(path, 0, number)
    return path


def _without(picture: RGB, left_out: Sequence[int], tile_px: int) -> RGB:
    """Return the picture with glass where tiles are left out."""
    picture = picture.copy()
    for number in left_out:
        y, x = (place * tile_px for place in divmod(number, picture.shape[1] // tile_px))
        picture[y : y + tile_px, x : x + tile_px] = 255
    return picture


def _philips_xml(spacings: Sequence[float], patient: str) -> str:
    def attribute(name: str, value: str) -> str:
        return f'<Attribute Name="{name}" Group="0" Element="0" PMSVR="IString">{value}</Attribute>'

    def array(name: str, items: Sequence[str]) -> str:
        return f'<Attribute Name="{name}" PMSVR="IDataObjectArray"><Array>{"".join(items)}</Array></Attribute>'

    def thing(kind: str, *attributes: str) -> str:
        return f'<DataObject ObjectType="{kind}">{"".join(attributes)}</DataObject>'

    spaced = [attribute("DICOM_PIXEL_SPACING", f"&quot;{s:.9f}&quot; &quot;{s:.9f}&quot;") for s in spacings]
    levels = [thing("PixelDataRepresentation", one) for one in spaced]
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "JPEG", comment=patient.encode())
    picture = attribute("PIM_DP_IMAGE_DATA", base64.b64encode(file.getvalue()).decode())
    label = thing("DPScannedImage", attribute("PIM_DP_IMAGE_TYPE", "LABELIMAGE"), picture)
    slide = thing(
        "DPScannedImage",
        attribute("PIM_DP_IMAGE_TYPE", "WSI"),
        spaced[0],
        array("PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE", levels),
    )
    facts = attribute("DICOM_MANUFACTURER", "PHILIPS") + attribute("PIIM_DP_SCANNER_OPERATOR_ID", patient)
    return '<?xml version="1.0" encoding="UTF-8" ?>' + thing(
        "DPUfsImport", facts, array("PIM_DP_SCANNED_IMAGES", [slide, label])
    )


def write_ventana(
    path: Path,
    picture: RGB,
    tiles: tuple[int, int],
    origin: tuple[int, int] = (0, 0),
    left_px: int = 0,
    overlap_px: int = 0,
    levels: int = 3,
    mpp: float = 0.25,
    tile_px: int = 128,
    patient: str = "Nobody",
) -> Path:
    """Write a BIF with one scanned area.

    Args:
        path: ``NAME.bif``.
        picture: ``(h, w, 3)`` uint8 of the scanned area; its tiles are cut from it ``tile_px - overlap_px`` apart.
        tiles: (rows, columns) of the area.
        origin: (row, column) of its first tile in the file.
        left_px: Glass to the left of it.
        overlap_px: What neighbouring tiles share.
        levels: Each half the one before.
        mpp: Microns per pixel of the finest.
        tile_px: Side of a tile.
        patient: Stands in the XML.
    """
    rows, columns = tiles
    step = tile_px - overlap_px
    stored: RGB = np.full(((origin[0] + rows) * tile_px, (origin[1] + columns) * tile_px, 3), 255, np.uint8)
    for row in range(rows):
        for column in range(columns):
            y, x = (origin[0] + row) * tile_px, (origin[1] + column) * tile_px
            part = picture[row * step : row * step + tile_px, column * step : column * step + tile_px]
            stored[y : y + tile_px, x : x + tile_px] = part
    scan = f'<iScan ZLayers="1" Magnification="40" ScanRes="{mpp}" UserName="{patient}" Barcode1D="{patient}"/>'
    info = _joints(tiles, tile_px, overlap_px, (origin[0] * tile_px, origin[1] * tile_px), left_px)
    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        small = np.full((64, 64, 3), 200, np.uint8)
        packet = [(700, "B", len(scan), scan.encode(), True)]
        tiff.write(small, photometric="rgb", description="Label Image", metadata=None, extratags=packet)
        for level in range(levels):
            tiff.write(
                iter([jpeg(tile, "ycbcr", quality=92) for tile in tiles_of(stored, tile_px)]),
                shape=stored.shape,
                description=f"level={level} mag={40 / 2**level:g} quality=92",
                extratags=[] if level else [(700, "B", len(info), info.encode(), True)],
                **_how(tile_px),
            )
            stored = halved(stored)
    return path


def _joints(tiles: tuple[int, int], tile_px: int, overlap_px: int, origin: tuple[int, int], left_px: int) -> str:
    """Return which tiles lie side by side: numbered from the lower left corner, up the slide in a meander.

    ```
    6 5 4
    1 2 3
    ```
    """
    rows, columns = tiles

    def number(up: int, column: int) -> int:
        return up * columns + (column if up % 2 == 0 else columns - 1 - column) + 1

    pairs = [("RIGHT", number(u, c), number(u, c + 1)) for u in range(rows) for c in range(columns - 1)]
    pairs += [("UP", number(u, c), number(u + 1, c)) for u in range(rows - 1) for c in range(columns)]
    joints = "".join(
        f'<TileJointInfo FlagJoined="1" Confidence="100" Direction="{way}" Tile1="{one}" Tile2="{two}" '
        f'OverlapX="{overlap_px if way == "RIGHT" else 0}" OverlapY="{overlap_px if way == "UP" else 0}"/>'
        for way, one, two in pairs
    )
    size = f'Width="{tile_px}" Height="{tile_px}" NumRows="{rows}" NumCols="{columns}" Pos-X="{left_px}" Pos-Y="0"'
    return (
        f'<EncodeInfo Ver="2"><SlideStitchInfo><ImageInfo AOIScanned="1" AOIIndex="0" {size}>{joints}</ImageInfo>'
        f'</SlideStitchInfo><AoiOrigin><AOI0 OriginX="{origin[1]}" OriginY="{origin[0]}"/></AoiOrigin></EncodeInfo>'
    )


def _how(tile_px: int) -> dict[str, object]:
    how = {"dtype": np.uint8, "tile": (tile_px, tile_px), "compression": "jpeg", "photometric": "ycbcr"}
    return how | {"subsampling": (2, 2), "metadata": None}
