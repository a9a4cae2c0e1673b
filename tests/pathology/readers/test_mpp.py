from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile

from pathology.errors import SlideError
from pathology.readers.mpp import is_sensible, mpp_of_resolution, parse_number, resolve_mpp
from pathology.readers.sources import open_source


@pytest.mark.parametrize(
    ("text", "value"), [("0.25", 0.25), ("0,25", 0.25), (" 1 ", 1.0), ("2.5e-1", 0.25), ("1.000,5", 1000.5)]
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "nan", "inf", "about 0.5", "0.25,5", "1,000,5"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError):
        parse_number(text)


@pytest.mark.parametrize(
    ("pixels", "unit", "mpp"),
    [(20_000, "centimeter", 0.5), (50_800, "inch", 0.5), (2_000, "millimeter", 0.5), (2, "micrometer", 0.5)],
)
def test_resolution_tags_in_any_unit(pixels: float, unit: str, mpp: float) -> None:
    assert mpp_of_resolution(pixels, unit) == pytest.approx(mpp)
    assert mpp_of_resolution(pixels, "") is None
    assert mpp_of_resolution(0, unit) == 0.0


@pytest.mark.parametrize(
    ("mpp", "sensible"),
    [((0.25, 0.25), True), ((0.25, 0.262), True), ((0.25, 0.27), False), ((0.0, 0.0), False), ((352.8, 352.8), False)],
)
def test_sense(mpp: tuple[float, float], sensible: bool) -> None:
    assert is_sensible(mpp) is sensible


def test_the_file_is_believed_when_the_manifest_agrees() -> None:
    assert resolve_mpp((0.25, 0.25), "0,255", None).origin == "file"
    assert resolve_mpp((0.25, 0.25), "", 0.5).um == (0.25, 0.25)


def test_file_and_manifest_apart_are_refused_with_both_values() -> None:
    with pytest.raises(SlideError, match=r"0\.25.*source_mpp.*0\.5"):
        resolve_mpp((0.25, 0.25), "0.5", None)


def test_manifest_then_flag_give_what_the_file_does_not() -> None:
    assert resolve_mpp(None, "0,5", 0.25).um == (0.5, 0.5)
    assert resolve_mpp((352.8, 352.8), "", 0.25).origin == "flag"


@pytest.mark.parametrize("stated", [None, (0.0, 0.0), (352.8, 352.8), (0.25, 0.5)])
def test_missing_or_absurd_names_value_column_and_flag(stated: tuple[float, float] | None) -> None:
    with pytest.raises(SlideError, match=r"source_mpp.*--slide-mpp") as caught:
        resolve_mpp(stated, "", None)
    if stated is not None:
        assert f"{stated[1]:.4g}" in str(caught.value)


@pytest.mark.parametrize("cell", ["0", "300", "yes"])
def test_an_absurd_cell_is_refused(cell: str) -> None:
    with pytest.raises(SlideError, match=cell):
        resolve_mpp(None, cell, 0.5)


def write_tiff(path: Path, resolution: tuple[object, object] | None, unit: int | None, ome: str = "") -> Path:
    tags = {} if resolution is None else {"resolution": resolution, "resolutionunit": unit}
    image = np.zeros((64, 96, 3), np.uint8)
    tifffile.imwrite(path, image, tile=(32, 32), photometric="rgb", metadata=None, description=ome or None, **tags)
    return path


@pytest.mark.parametrize(
    ("pixels", "unit", "mpp"),
    [(101_600, 2, 0.25), (40_000, 3, 0.25), (4_000, 4, 0.25), (4, 5, 0.25), (72, 2, 352.78), (40_000, 1, None)],
)
@pytest.mark.parametrize("tiled_suffix", [".tif", ".ome.tif"])
def test_a_files_resolution_tags_in_any_unit(
    tmp_path: Path, pixels: int, unit: int, mpp: float | None, tiled_suffix: str
) -> None:
    source = open_source(write_tiff(tmp_path / f"a{tiled_suffix}", (pixels, pixels), unit))
    assert source.mpp == (None if mpp is None else pytest.approx((mpp, mpp), rel=1e-4))


@pytest.mark.parametrize(
    ("x", "y", "unit", "mpp"),
    [
        ("0.25", "0.25", None, (0.25, 0.25)),
        ("0,26", "0,25", "µm", (0.25, 0.26)),
        ("0.25", "0.25", "\u03bcm", (0.25, 0.25)),
        ("250", "250", "nm", (0.25, 0.25)),
        ("2500", "2500", "Å", (0.25, 0.25)),
        ("0.00025", "0.00025", "mm", (0.25, 0.25)),
        ("0.000025", "0.000025", "cm", (0.25, 0.25)),
        ("9.84252e-6", "9.84252e-6", "in", (0.25, 0.25)),
        ("0.01", "0.01", "thou", (0.254, 0.254)),
        ("0.25", "0.25", "pixel", None),
        ("0.25", None, "µm", None),
        ("many", "0.25", "µm", None),
    ],
)
def test_physical_sizes_of_ome_in_any_unit(
    tmp_path: Path, x: str, y: str | None, unit: str | None, mpp: tuple[float, float] | None
) -> None:
    sizes = f'PhysicalSizeX="{x}"' + (f' PhysicalSizeY="{y}"' if y else "")
    units = "" if unit is None else f' PhysicalSizeXUnit="{unit}" PhysicalSizeYUnit="{unit}"'
    schema = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
    xml = f"""<OME xmlns="{schema}"><Image ID="Image:0"><Pixels ID="Pixels:0" Type="uint8"
    SizeX="96" SizeY="64" SizeC="3" SizeZ="1" SizeT="1"
    DimensionOrder="XYCZT" {sizes}{units}><Channel ID="Channel:0" SamplesPerPixel="3"/>
    <TiffData IFD="0"/></Pixels></Image></OME>"""
    path = tmp_path / "a.ome.tif"
    image = np.zeros((64, 96, 3), np.uint8)
    tifffile.imwrite(path, image, tile=(32, 32), photometric="rgb", metadata=None, description=xml.encode())
    found = open_source(path).mpp
    assert found == (None if mpp is None else pytest.approx(mpp, rel=1e-4))


@pytest.mark.parametrize("text", ["0", "0,0", "-0.25", "499", "0.001", "9999.9", "1.000,0"])
def test_an_absurd_mpp_of_a_scanner_is_refused_with_its_value(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.svs"
    about = f"Aperio Image Library v1\r\n96x64 (32x32)|AppMag = 20|MPP = {text}"
    image = np.zeros((64, 96, 3), np.uint8)
    tifffile.imwrite(
        path, image, tile=(32, 32), photometric="rgb", metadata=None, description=about, compression="jpeg"
    )
    source = open_source(path)
    assert source.vendor == "aperio"
    value = "1000.0" if text == "1.000,0" else f"{float(text.replace(',', '.')):g}"
    with pytest.raises(SlideError, match=rf"states {re.escape(value)} µm/px.*source_mpp.*--slide-mpp"):
        resolve_mpp(source.mpp, "", None)
    assert resolve_mpp(source.mpp, "0,25", None).um == (0.25, 0.25)
    assert resolve_mpp(source.mpp, "", 0.25).origin == "flag"


@pytest.mark.parametrize("per", [0, 1])
@pytest.mark.parametrize("shape", [{"tile": (32, 32)}, {"rowsperstrip": 16}])
def test_a_resolution_of_nothing_is_refused_with_its_value(tmp_path: Path, per: int, shape: dict[str, object]) -> None:
    how = {"photometric": "rgb", "metadata": None, "resolution": (1, 1), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((64, 96, 3), np.uint8), **how, **shape)
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff, (tmp_path / "a.tif").open("r+b") as file:
        for name in ("XResolution", "YResolution"):
            file.seek(tiff.pages[0].tags[name].valueoffset)
            file.write(struct.pack("<II", 0, per))
    with pytest.raises(SlideError, match="states 0 µm/px, or a resolution of 0, which is not plausible"):
        resolve_mpp(open_source(tmp_path / "a.tif").mpp, "", None)


def test_pixels_that_are_not_square_are_refused_beyond_five_per_cent(tmp_path: Path) -> None:
    square = open_source(write_tiff(tmp_path / "a.tif", (40_000, 41_900), 3)).mpp
    assert square is not None and resolve_mpp(square, "", None).um == square
    oblong = open_source(write_tiff(tmp_path / "b.tif", (40_000, 43_000), 3)).mpp
    with pytest.raises(SlideError, match=r"0\.2326 × 0\.25 µm/px \(y, x\).*square within 5 %"):
        resolve_mpp(oblong, "", None)


@pytest.mark.parametrize("edge", [0.05, 20.0])
def test_the_ends_of_what_makes_sense(edge: float) -> None:
    assert is_sensible((edge, edge))
    assert not is_sensible((edge * (0.99 if edge < 1 else 1.01),) * 2)


@pytest.mark.parametrize("nonsense", [0.00499, 28.97])
def test_flag_and_manifest_win_over_nonsense_and_over_sense_only_by_force(nonsense: float) -> None:
    wrong, right = (nonsense, nonsense), (0.25, 0.25)
    assert resolve_mpp(wrong, "", 0.5).um == (0.5, 0.5) and resolve_mpp(wrong, "0.4", 0.5).origin == "manifest"
    assert resolve_mpp(right, "", 0.5).um == right
    assert resolve_mpp(right, "", 0.5, force=True).um == (0.5, 0.5)
    assert (
        resolve_mpp(right, "0.4", 0.5, force=True).um == (0.4, 0.4) and resolve_mpp(right, "", None, True).um == right
    )
    with pytest.raises(SlideError, match=r"by more than 5 %.*--force-mpp"):
        resolve_mpp(right, "0.4", None)
    with pytest.raises(SlideError) as caught:
        resolve_mpp(wrong, "", None)
    assert "square" not in str(caught.value) and "0.05 to 20" in str(caught.value)
