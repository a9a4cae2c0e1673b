"""Tiles whose colours are not those that the tags state."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import imagecodecs
import numpy as np
import pydicom
import pytest
import tifffile
from PIL import Image

from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.readers.facts.colour import pixels_say
from pathology.readers.slide_source import SlideSource
from pathology.readers.sources import open_source
from pathology.tissue.quality import has_unlikely_colours
from tests.pathology.readers import dicom_slides, jpeg_2000_tiles
from tests.pathology.readers.scanners import jpeg, jpeg_2000, tiles_of, write_encoded
from tests.pathology.tiffs import RGB, halved

SIZE = (512, 640)


def tissue(seed: int = 0, glass: bool = True) -> RGB:
    """Return pink and violet tissue, with glass around it or without."""
    rng = np.random.default_rng(seed)
    h, e = (np.kron(rng.random((SIZE[0] // 16, SIZE[1] // 16)), np.ones((16, 16)))[..., None] for _ in range(2))
    image = 242 * np.exp(-0.8 * h * (0.65, 0.70, 0.29) - 0.6 * e * (0.07, 0.99, 0.11))
    if glass:
        image[: SIZE[0] // 4] = 242
    return image.astype(np.uint8)


def jfif(tile: RGB) -> bytes:
    return bytes(imagecodecs.jpeg8_encode(tile, level=92))


def adobe(tile: RGB, transform: int) -> bytes:
    """Return a JPEG of RGB (0) or YCbCr (1) with Adobe's marker for it."""
    data = jpeg(tile, "rgb" if transform == 0 else "ycbcr", "4:4:4", 92)
    return data[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform]) + data[2:]


def write(path: Path, images: list[RGB], encode: object, photometric: int, aperio: bool = False) -> Path:
    """Write JPEG tiles under a tag that tifffile itself would not write for them."""
    place = {} if aperio else {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
    stated = "ycbcr" if photometric == 6 else "rgb"
    write_encoded(path, images, encode, "jpeg", stated, aperio=aperio, **place)  # type: ignore[arg-type]
    with tifffile.TiffFile(path, mode="r+") as tiff:
        for page in tiff.pages:
            page.tags["PhotometricInterpretation"].overwrite(photometric)
    return path


def shown(path: Path) -> tuple[RGB, list[str]]:
    with closing(open_source(path)) as slide:
        return slide.read(Box.of_size(*SIZE), 0), [n.text for n in slide.facts.notes if n.flag == "colour"]


def off(found: RGB, true: RGB) -> float:
    return float(np.abs(found.astype(int) - true).mean())


@pytest.mark.parametrize("glass", [True, False])
@pytest.mark.parametrize("aperio", [True, False], ids=["aperio", "generic"])
def test_jfif_tiles_under_the_tag_rgb_are_ycbcr(tmp_path: Path, aperio: bool, glass: bool) -> None:
    image = tissue(glass=glass)
    found, notes = shown(write(tmp_path / "a.tif", [image, halved(image)], jfif, 2, aperio))
    assert off(found, image) < 4
    assert len(notes) == 1 and "says RGB, its JPEG tiles YCbCr" in notes[0]


@pytest.mark.parametrize(("transform", "photometric"), [(0, 6), (1, 2)])
def test_adobes_marker_is_believed_against_the_tag(tmp_path: Path, transform: int, photometric: int) -> None:
    image = tissue()
    found, notes = shown(write(tmp_path / "a.tif", [image], lambda tile: adobe(tile, transform), photometric))
    assert off(found, image) < 4 and len(notes) == 1


@pytest.mark.parametrize("aperio", [True, False], ids=["aperio", "generic"])
def test_a_marker_against_tag_and_pixels_is_not_believed(tmp_path: Path, aperio: bool) -> None:
    image = tissue()

    def marked(tile: RGB) -> bytes:
        data = jpeg(tile, "rgb", "4:4:4", 92)
        return data[:2] + b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00" + data[2:]

    found, notes = shown(write(tmp_path / "a.tif", [image], marked, 2, aperio))
    assert off(found, image) < 4 and notes == []


@pytest.mark.parametrize(("stored", "photometric"), [("rgb", 2), ("ycbcr", 6)])
def test_tiles_that_agree_with_their_tag_have_no_note(tmp_path: Path, stored: str, photometric: int) -> None:
    image = tissue()
    found, notes = shown(write(tmp_path / "a.tif", [image], lambda tile: jpeg(tile, stored, "4:4:4", 92), photometric))
    assert off(found, image) < 4 and notes == []


def test_jpeg_2000_with_its_own_transform_is_not_transformed_twice(tmp_path: Path) -> None:
    image = tissue()
    for compression, ycbcr, noted in ((33003, False, True), (33003, True, False), (33005, False, False)):
        path = tmp_path / f"{compression}-{ycbcr}.svs"
        write_encoded(path, [image], lambda tile, y=ycbcr: jpeg_2000(tile, y), compression, "rgb")  # type: ignore[misc]
        found, notes = shown(path)
        assert off(found, image) < 4 and bool(notes) is noted


@pytest.mark.parametrize(("photometric", "refused"), [("YBR_FULL_422", False), ("RGB", True)])
def test_dicom_frames_against_their_declaration_are_refused(tmp_path: Path, photometric: str, refused: bool) -> None:
    image = tissue()
    dicom_slides.write_series(tmp_path / "a", "a", image, "1.2.3", levels=1, photometric=photometric)
    if not refused:
        open_source(tmp_path / "a").close()
        return
    with pytest.raises(SlideError, match="PhotometricInterpretation is RGB"):
        open_source(tmp_path / "a")


def test_stored_components_tell_what_they_are() -> None:
    for glass in (True, False):
        rgb = tissue(glass=glass)
        ycbcr = np.asarray(Image.fromarray(rgb).convert("YCbCr"))
        assert (pixels_say([rgb]), pixels_say([ycbcr])) == ("rgb", "ycbcr")
    assert pixels_say([]) == "" and pixels_say([np.full((8, 8, 3), 100, np.uint8)]) == ""


def test_tissue_in_colours_of_no_stain_is_flagged(tmp_path: Path) -> None:
    """Nothing in the file contradicts its tag, but its pixels are YCbCr."""
    image = tissue()
    options = IngestOptions(mpp=0.5)
    wrong = write(tmp_path / "wrong.tif", [image], lambda tile: jpeg(tile, "ycbcr", "4:4:4", 92), 2)
    right = write(tmp_path / "right.tif", [image], lambda tile: jpeg(tile, "ycbcr", "4:4:4", 92), 6)
    assert "colour" in ingest_slide(wrong, tmp_path / "store", options).flags
    assert "colour" not in ingest_slide(right, tmp_path / "store", options).flags
    picture = Image.fromarray(tissue(glass=False))
    as_rgb = np.asarray(picture.convert("YCbCr"))
    as_ycbcr = np.asarray(Image.frombytes("YCbCr", picture.size, picture.tobytes()).convert("RGB"))
    found = [has_unlikely_colours(one.reshape(-1, 3).T) for one in (np.asarray(picture), as_rgb, as_ycbcr)]
    assert found == [False, True, True]


def test_a_damaged_tile_is_no_evidence(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(next(tiles_of(tissue(), 128))).save(file, "JPEG")
    path = write(tmp_path / "a.tif", [tissue()], lambda tile: file.getvalue()[:200], 2)
    open_source(path).close()


def jpeg_2000_tiff(path: Path, encode: object, compression: int, photometric: int) -> tuple[Path, RGB]:
    image = tissue()
    place = {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
    write_encoded(path, [image], encode, compression, "rgb", aperio=compression != 34712, **place)  # type: ignore[arg-type]
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags["PhotometricInterpretation"].overwrite(photometric)
    return path, image


@pytest.mark.parametrize(("compression", "photometric"), [(33003, 2), (33005, 2), (33005, 6), (34712, 2), (34712, 6)])
@pytest.mark.parametrize("box", ["", "rgb", "ycbcr", "grey"])
def test_jpeg_2000_is_read_as_its_codestream_and_box_say(
    tmp_path: Path, box: str, compression: int, photometric: int
) -> None:
    """What the tags and the tiles say of the same pixels; every reading but the right one is off by 40 or more."""
    declared = "ycbcr" if compression == 33003 or (compression, photometric) == (34712, 6) else "rgb"
    for holds, transform in ((holds, transform) for holds in ("rgb", "ycbcr") for transform in (False, True)):
        stated = {box, "rgb" if transform else ""} - {"", "grey"} | {declared}
        if holds not in stated:
            continue  # every statement is wrong: only the colours of the tissue tell, by their flag
        path, image = jpeg_2000_tiff(
            tmp_path / f"{holds}-{transform}.tif",
            lambda tile, how=(holds, box, transform): jpeg_2000_tiles.encoded(tile, *how),  # type: ignore[misc]
            compression,
            photometric,
        )
        found, notes = shown(path)
        assert off(found, image) < 2, (holds, transform)
        assert notes or holds == declared, (holds, transform)


@pytest.mark.parametrize(("compression", "photometric"), [(33003, 2), (33005, 2), (34712, 2), (34712, 6)])
def test_chroma_of_fewer_columns_is_converted_once(tmp_path: Path, compression: int, photometric: int) -> None:
    path, image = jpeg_2000_tiff(tmp_path / "a.tif", jpeg_2000_tiles.subsampled, compression, photometric)
    found, notes = shown(path)
    assert off(found, image) < 4
    assert bool(notes) is (compression == 33005 or (compression, photometric) == (34712, 2))


@pytest.mark.parametrize("compression", [33005, 34712])
def test_jpeg_2000_that_says_other_colours_is_refused(tmp_path: Path, compression: int) -> None:
    tiles = iter(["rgb", "ycbcr"] * 99)
    for name, encode, said in (
        ("cmyk", lambda tile: jpeg_2000_tiles.encoded(tile, "rgb", "cmyk"), "hold CMYK"),
        ("mixed", lambda tile: jpeg_2000_tiles.encoded(tile, "rgb", next(tiles)), "others YCbCr"),
    ):
        with pytest.raises(SlideError, match=said):
            open_source(jpeg_2000_tiff(tmp_path / f"{name}.tif", encode, compression, 2)[0])


def test_transparent_pixels_of_jpeg_2000_are_blended_over_white(tmp_path: Path) -> None:
    image, opacity = tissue(), np.zeros((*SIZE, 1), np.uint8)
    opacity[:, ::2] = 255
    kind = {"compression": "jpeg2000", "compressionargs": {"level": 0, "reversible": True}}
    tifffile.imwrite(
        tmp_path / "a.tif",
        np.concatenate([image, opacity], 2),
        tile=(128, 128),
        photometric="rgb",
        extrasamples=["unassalpha"],
        resolution=(2e4, 2e4),
        resolutionunit="CENTIMETER",
        **kind,
    )
    found, _ = shown(tmp_path / "a.tif")
    assert np.array_equal(found, np.where(opacity, image, 255))


_LOSSLESS_JPEG_2000 = "1.2.840.10008.1.2.4.90"


@pytest.mark.parametrize("photometric", ["RGB", "YBR_RCT"])
@pytest.mark.parametrize("transform", [True, False])
def test_dicom_frames_of_jpeg_2000_are_right_or_refused(tmp_path: Path, photometric: str, transform: bool) -> None:
    image = tissue()

    def opened(holds: str, box: str = "") -> SlideSource:
        how = {"photometric": photometric, "syntax": _LOSSLESS_JPEG_2000, "levels": 1}
        encode = lambda tile: jpeg_2000_tiles.encoded(tile, holds, box, transform)  # noqa: E731
        folder = tmp_path / f"{holds}-{box}"
        dicom_slides.write_series(folder, "a", image, "1.2.3", encode=encode, **how)  # type: ignore[arg-type]
        return open_source(folder)

    with closing(opened("rgb")) as slide:
        assert np.array_equal(slide.read(Box.of_size(*SIZE), 0), image)
    with pytest.raises(SlideError, match=f"PhotometricInterpretation is {photometric}, but .* hold YCbCr"):
        opened("ycbcr")
    for box in ("rgb", "ycbcr", "grey"):
        with pytest.raises(SlideError, match="its frames are JP2 files"):
            opened("rgb", box)


def test_the_advice_for_jpeg_frames_of_dicom_works(tmp_path: Path) -> None:
    files = dicom_slides.write_series(tmp_path, "a", tissue(), "1.2.3", levels=1, photometric="RGB")
    with pytest.raises(SlideError, match="make it YBR_FULL_422 in the slide's files"):
        open_source(files[1])
    for file in files:
        slide = pydicom.dcmread(file)
        slide.PhotometricInterpretation = "YBR_FULL_422"
        slide.save_as(file)
    found, _ = shown(files[1])
    assert off(found, tissue()) < 4


@pytest.mark.parametrize("channels", [1, 3])
def test_a_dark_ground_is_flagged(tmp_path: Path, channels: int) -> None:
    """Fluorescence, as one channel or drawn in colours; the black beside a scanned part is no ground."""
    cells = np.full((*SIZE, 3), 6, np.uint8)
    cells[100:300, 150:400] = 120
    beside = tissue()
    beside[:, :400] = 0
    for name, image, flagged in (("cells", cells // (3, 1, 8), True), ("beside", beside, False)):
        kind = {"photometric": "rgb" if channels == 3 else "minisblack", "tile": (128, 128)}
        pixels = image.astype(np.uint8) if channels == 3 else image[..., 1].astype(np.uint8)
        tifffile.imwrite(tmp_path / f"{name}.tif", pixels, resolution=(2e4, 2e4), resolutionunit=3, **kind)
        assert (
            "colour" in ingest_slide(tmp_path / f"{name}.tif", tmp_path / "s", IngestOptions(mpp=0.5)).flags
        ) is flagged
