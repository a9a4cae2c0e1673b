"""Files with one contradiction each, drawn at random: what is read is right, refused, or noted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.options import IngestOptions
from pathology.readers.sources import open_source, scene_count
from tests.pathology.readers.czi_files import write_czi
from tests.pathology.readers.dicom_slides import write_series
from tests.pathology.readers.facts.test_colour import adobe, jfif
from tests.pathology.readers.facts.test_levels import textured
from tests.pathology.readers.facts.test_pixel_size import aperio, ome
from tests.pathology.readers.jpeg_2000_tiles import encoded
from tests.pathology.readers.ngff_stores import write_plain
from tests.pathology.readers.scanners import jpeg, write_encoded
from tests.pathology.tiffs import RGB, halved

FEW, MANY = 30, 500
TOLERANCE = 6.0
Rng = np.random.Generator
Drawn = tuple[Path, RGB, float | None]
"""A file, its true pixels, its true microns per pixel; None: the file cannot tell."""


def save(path: Path, pages: list[RGB], mpp: float | None, text: str = "", **how: object) -> Path:
    place = {} if mpp is None else {"resolution": (1e4 / mpp,) * 2, "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as tiff:
        for k, page in enumerate(pages):
            first = {**place, "description": text.encode() or None} if not k else {}
            every = {"photometric": "rgb", "tile": (64, 64), "compression": "deflate", "metadata": None, **how}
            tiff.write(page, subfiletype=bool(k), **first, **every)
    return path


def picture(rng: Rng) -> RGB:
    return textured(int(rng.integers(4, 7)) * 64, int(rng.integers(4, 7)) * 64, int(rng.integers(1000)))


def wrong_tags(folder: Path, rng: Rng) -> Drawn:
    image, mpp = picture(rng), float(rng.choice([0.25, 0.5, 1.0]))
    tags = mpp * float(rng.choice([0.1, 1 / 2.54, 0.5, 2, 2.54, 10]))
    power = str(round(10 / mpp)) if rng.random() < 0.5 else ""
    return save(folder / "a.ome.tif", [image], tags, ome(str(mpp), size=image.shape[:2], power=power)), image, mpp


def wrong_text(folder: Path, rng: Rng) -> Drawn:
    image, mpp = picture(rng), float(rng.choice([0.25, 0.5]))
    stated = f"{mpp * float(rng.choice([0.1, 10, 4, 0.25])):g}"
    text = aperio(AppMag=f"{10 / mpp:g}", MPP=stated)
    return save(folder / "a.svs", [image], mpp if rng.random() < 0.5 else None, text), image, mpp


def garbled_unit(folder: Path, rng: Rng) -> Drawn:
    image, unit = picture(rng), str(rng.choice(["Âµm", "碌m", "Î¼m"]))
    return save(folder / "a.ome.tif", [image], None, ome("0.5", unit, image.shape[:2])), image, 0.5


def reduced_later(folder: Path, rng: Rng) -> Drawn:
    image, factor = picture(rng), int(rng.choice([2, 4]))
    tags = 0.5 * factor if rng.random() < 0.5 else None
    text = ome("0.5", size=(image.shape[0] * factor, image.shape[1] * factor))
    return save(folder / "a.ome.tif", [image], tags, text), image, 0.5 * factor


def wrong_level(folder: Path, rng: Rng) -> Drawn:
    image = picture(rng)
    level = halved(image)
    others = [
        level[::-1],
        level[:, ::-1],
        255 - level,
        level[: level.shape[0] // 2],
        halved(textured(*image.shape[:2], seed=7777)),
    ]
    wrong = np.ascontiguousarray(others[int(rng.integers(len(others)))])
    pages = [image, wrong, halved(level)] if rng.random() < 0.5 else [image, level, wrong]
    return save(folder / "a.tif", pages, 0.5), image, 0.5


def wrong_colour(folder: Path, rng: Rng) -> Drawn:
    image = picture(rng)
    kinds: list[tuple[Callable[[RGB], bytes], int]] = [
        (jfif, 2),
        (lambda tile: adobe(tile, 1), 2),
        (lambda tile: adobe(tile, 0), 6),
        (lambda tile: jpeg(tile, "ycbcr", "4:4:4", 92), 6),
    ]
    encode, photometric = kinds[int(rng.integers(len(kinds)))]
    place = {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
    stated = "ycbcr" if photometric == 6 else "rgb"
    path = write_encoded(folder / "a.tif", [image], encode, "jpeg", stated, aperio=False, **place)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags["PhotometricInterpretation"].overwrite(photometric)
    return path, image, 0.5


def wrong_samples(folder: Path, rng: Rng) -> Drawn:
    image = picture(rng)
    stored = (image.astype(np.int16) - 128).astype(np.int8) if rng.random() < 0.5 else image.astype(np.uint16) * 16
    return save(folder / "a.tif", [stored], 0.5), image, 0.5  # type: ignore[list-item]


def several_planes(folder: Path, rng: Rng) -> Drawn:
    image = picture(rng)
    layout = {"tile": (64, 64)} if rng.random() < 0.5 else {"rowsperstrip": 64}
    planes = [image, *(textured(*image.shape[:2], seed=k) for k in (1, 2))]
    with tifffile.TiffWriter(folder / "a.tif") as tiff:
        for plane in planes:
            tiff.write(plane, photometric="rgb", metadata=None, **layout)
    return folder / "a.tif", image, None


def turned_label(folder: Path, rng: Rng) -> Drawn:
    image, label = picture(rng), textured(64, 128, 3)
    with tifffile.TiffWriter(folder / "a.tif") as tiff:
        for page, turn in ((label, int(rng.integers(2, 9))), (image, 1)):
            tag = [(274, "H", 1, turn, True)]
            tiff.write(
                page,
                photometric="rgb",
                tile=(64, 64),
                metadata=None,
                extratags=tag,
                resolution=(2e4, 2e4),
                resolutionunit=3,
            )
    return folder / "a.tif", image, 0.5


def wrong_dicom(folder: Path, rng: Rng) -> Drawn:
    image, wrong = picture(rng), {"photometric": "RGB"} if rng.random() < 0.5 else {"focal_planes": 3}
    write_series(folder / "a", "a", image, "1.2.3", levels=1, **wrong)
    return folder / "a", image, 0.5


def wrong_zarr(folder: Path, rng: Rng) -> Drawn:
    """A store whose scales, unit, a level or names of channels are not what its pixels are."""
    image, mpp, what = picture(rng), float(rng.choice([0.25, 0.5, 1.0])), int(rng.integers(5))
    levels, scales, more = [image, halved(image), halved(halved(image))], [mpp, 2 * mpp, 4 * mpp], {}
    if what == 0:
        scales[int(rng.integers(3))] *= float(rng.choice([0.1, 0.5, 2, 10]))
    elif what == 1:
        more["unit"] = str(rng.choice(["", "pixel", "nanometer", "millimeter"]))
    elif what == 2:
        levels[2] = textured(*levels[2].shape[:2], 7777)
    elif what == 3:
        levels[1] = levels[1][:, : levels[1].shape[1] * 3 // 4]
    else:
        order = [str(name) for name in rng.permutation(["Red", "Green", "Blue"])]
        more["channels"] = [{"label": name} for name in order]
        levels = [level[..., [("Red", "Green", "Blue").index(name) for name in order]] for level in levels]
    axes = str(rng.choice(["yxc", "cyx", "tczyx"]))
    return (
        write_plain(folder / "a.zarr", levels, axes, scales=scales, zarr_format=int(rng.integers(2, 4)), **more),
        image,
        mpp,
    )


def wrong_jpeg_2000(folder: Path, rng: Rng) -> Drawn:
    """Tiles whose transform or colour box contradicts the tags or each other; one of the statements is true."""
    image, (compression, photometric) = picture(rng), rng.choice([(33003, 2), (33005, 2), (34712, 2), (34712, 6)])
    declared = "ycbcr" if compression == 33003 or photometric == 6 else "rgb"
    box, transform = str(rng.choice(["", "rgb", "ycbcr", "grey"])), bool(rng.random() < 0.5)
    stated = sorted({box, "rgb" if transform else declared, declared} - {"", "grey"})
    holds = stated[int(rng.integers(len(stated)))]
    place = {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
    encode = lambda tile: encoded(tile, holds, box, transform)  # noqa: E731
    path = write_encoded(folder / "a.tif", [image], encode, int(compression), "rgb", aperio=False, **place)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tiff.pages[0].tags["PhotometricInterpretation"].overwrite(int(photometric))
    return path, image, 0.5


def wrong_czi(folder: Path, rng: Rng) -> Drawn:
    image, wrong = picture(rng), int(rng.integers(1, 3))
    changes = (lambda part: part[::-1], lambda part: 255 - part, lambda part: textured(*part.shape[:2], seed=7777))
    change = changes[int(rng.integers(3))]
    box = (0, image.shape[0], 0, image.shape[1])
    return write_czi(folder / "a.czi", image, [box], tile_px=64, changed={wrong: change}), image, 0.25


KINDS = (
    *(wrong_tags, wrong_text, garbled_unit, reduced_later, wrong_level, wrong_colour, wrong_samples, several_planes),
    *(turned_label, wrong_dicom, wrong_zarr, wrong_jpeg_2000, wrong_czi),
)


def check(folder: Path, number: int) -> str:
    """Draw a file and read it; return what happened, and fail if it is wrong in silence."""
    rng = np.random.default_rng(number)
    folder.mkdir()
    draw = KINDS[number % len(KINDS)]
    path, image, mpp = draw(folder, rng)
    try:
        with closing(open_source(path)) as slide:
            um = IngestOptions().mpp_of(slide, {}).um[0]
            levels = [slide.read(Box.of_size(v.height_px, v.width_px), k) for k, v in enumerate(slide.levels)]
            factors, notes = [v.downsample[0] for v in slide.levels], [note.text for note in slide.facts.notes]
    except SlideError as error:
        assert len(str(error)) > 20
        return "refused"
    assert scene_count(path) == 1
    where = (draw.__name__, number, notes)
    assert levels[0].shape == image.shape and np.abs(levels[0].astype(int) - image).mean() < TOLERANCE, where
    assert notes or mpp is None or abs(um / mpp - 1) < 0.05, where
    expected = image
    for level, factor in zip(levels, factors, strict=True):
        while image.shape[0] // expected.shape[0] < round(factor):
            expected = halved(expected)
        assert level.shape == expected.shape and np.abs(level.astype(int) - expected).mean() < TOLERANCE, where
    return "noted" if notes else "right"


def test_nothing_is_wrong_in_silence(tmp_path: Path) -> None:
    found = [check(tmp_path / str(number), number) for number in range(FEW)]
    assert {"refused", "noted", "right"} == set(found)


@pytest.mark.soak
def test_nothing_is_wrong_in_silence_in_many_files(tmp_path: Path) -> None:
    found = [check(tmp_path / str(number), number) for number in range(FEW, FEW + MANY)]
    print({kind: found.count(kind) for kind in sorted(set(found))})
    assert {"refused", "noted", "right"} == set(found)
