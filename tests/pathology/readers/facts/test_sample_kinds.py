"""Pixels that are not 8-bit RGB or grey: read right, or refused with a command that gives the right pixels."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
from PIL import Image

from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.readers.sources import open_source
from tests.pathology.readers.scanners import smooth
from tests.pathology.tiffs import RGB

SIZE = (256, 256)
TILED = {"tile": (128, 128), "metadata": None, "compression": "deflate"}
STRIPED = {"rowsperstrip": 64, "metadata": None}


def shown(path: Path) -> RGB:
    with closing(open_source(path)) as slide:
        return slide.read(Box.of_size(*SIZE), 0)


def planar(path: Path, image: RGB, how: dict[str, object]) -> None:
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))
    tifffile.imwrite(path, planes, photometric="rgb", planarconfig="separate", **how)


def samples(change: Callable[[RGB], npt.NDArray[np.generic]], photometric: str = "rgb") -> Callable[..., None]:
    return lambda path, image, how: tifffile.imwrite(path, change(image), photometric=photometric, **how)


def grey_with_opacity(scale: int, kind: str) -> Callable[..., None]:
    """Return what writes grey on the left half, and transparent black on the right."""

    def write(path: Path, image: RGB, how: dict[str, object]) -> None:
        both = np.stack([image[..., 0], np.full(SIZE, 255, np.uint8)], 2).astype(np.uint16 if scale > 1 else np.uint8)
        both[:, 128:] = 0
        tifffile.imwrite(path, both * scale, photometric="minisblack", extrasamples=[kind], **how)

    return write


def after_a_label(path: Path, image: RGB, how: dict[str, object]) -> None:
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(np.full((60, 80, 3), 200, np.uint8), photometric="rgb", metadata=None)
        tiff.write(image.astype(np.uint16) * 257, photometric="rgb", **how)


def palette_of_16_bits(path: Path, image: RGB, how: dict[str, object]) -> None:
    table = np.zeros((3, 65536), np.uint16)
    table[:, 1000:1256] = np.arange(256) * 257
    tifffile.imwrite(path, image[..., 0].astype(np.uint16) + 1000, photometric="palette", colormap=table, **how)


KINDS: dict[str, tuple[Callable[..., None], str, int]] = {
    "planar": (planar, "3 × 8 bit RGB in separate planes", 0),
    "16 bit": (samples(lambda a: a.astype(np.uint16) * 257), "3 × 16 bit RGB", 0),
    "12 of 16 bit": (samples(lambda a: a.astype(np.uint16) * 16), "3 × 16 bit RGB", 0),
    "10 of 16 bit": (samples(lambda a: a.astype(np.uint16) * 4), "3 × 16 bit RGB", 0),
    "grey 16 bit": (samples(lambda a: a[..., 0].astype(np.uint16) * 257, "minisblack"), "1 × 16 bit MINISBLACK", 0),
    "signed": (samples(lambda a: (a.astype(np.int16) - 128).astype(np.int8)), "3 × signed 8 bit RGB", 0),
    "float to 1": (samples(lambda a: (a / 255).astype(np.float32)), "3 × float 32 bit RGB", 1),
    "float to 255": (samples(lambda a: a.astype(np.float32)), "3 × float 32 bit RGB", 1),
    "float to 65535": (samples(lambda a: a.astype(np.float32) * 257), "3 × float 32 bit RGB", 1),
    "float above 1": (samples(lambda a: (a / 254).astype(np.float32)), "3 × float 32 bit RGB", 2),
    "signed 16 bit": (samples(lambda a: (a.astype(int) * 257 - 32768).astype(np.int16)), "3 × signed 16 bit RGB", 0),
    "positive, signed 16 bit": (samples(lambda a: a.astype(np.int16)), "3 × signed 16 bit RGB", 0),
    "8 of signed 16 bit": (samples(lambda a: a.astype(np.int16) - 128), "3 × signed 16 bit RGB", 0),
    "grey, 0 is white": (samples(lambda a: 65535 - a[..., 0].astype(np.uint16) * 257, "miniswhite"), "1 × 16 bit", 0),
    "grey with opacity": (grey_with_opacity(1, "unassalpha"), "2 × 8 bit MINISBLACK", 0),
    "grey with opacity, multiplied": (grey_with_opacity(1, "assocalpha"), "2 × 8 bit MINISBLACK", 0),
    "grey with opacity, 16 bit": (grey_with_opacity(257, "unassalpha"), "2 × 16 bit MINISBLACK", 0),
    "after a label": (after_a_label, "3 × 16 bit RGB", 0),
    "grey palette of 16 bit": (palette_of_16_bits, "1 × 16 bit PALETTE", 0),
    "YCbCr": (samples(lambda a: np.asarray(Image.fromarray(a).convert("YCbCr")), "ycbcr"), "3 × 8 bit YCBCR", 4),
}


@pytest.mark.parametrize("how", [TILED, STRIPED], ids=["tiled", "striped"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_samples_are_refused_and_the_advice_works(tmp_path: Path, kind: str, how: dict[str, object]) -> None:
    write, words, off = KINDS[kind]
    image = np.clip(smooth(*SIZE), 0, 254)
    image[0, 0] = 255
    write(tmp_path / "IN.tif", image, how)
    with pytest.raises(SlideError, match=rf"its pixels are {words}.*only 8-bit RGB or grey.*--slide-mpp") as caught:
        open_source(tmp_path / "IN.tif")
    (code,) = re.findall(r'python -c "(.*)"$', str(caught.value))
    exec(code.replace("IN.tif", str(tmp_path / "IN.tif")).replace("OUT.tif", str(tmp_path / "OUT.tif")))
    found = shown(tmp_path / "OUT.tif").astype(int)
    true = np.broadcast_to(image[..., :1], image.shape).copy() if "grey" in kind else image
    if "opacity" in kind:
        true[:, 128:] = 255
    assert np.abs(found - true).max() <= off


def test_inks_are_refused_and_the_advice_works(tmp_path: Path) -> None:
    inks = np.zeros((*SIZE, 4), np.uint8)
    inks[:100, :, 1] = 255
    tifffile.imwrite(tmp_path / "IN.tif", inks, photometric="separated", **STRIPED)
    with pytest.raises(SlideError, match="4 × 8 bit SEPARATED") as caught:
        open_source(tmp_path / "IN.tif")
    (code,) = re.findall(r'python -c "(.*)"$', str(caught.value))
    exec(code.replace("IN.tif", str(tmp_path / "IN.tif")).replace("OUT.tif", str(tmp_path / "OUT.tif")))
    found = shown(tmp_path / "OUT.tif")
    assert found[50, 50].tolist() == [255, 0, 255] and found[200, 50].tolist() == [255, 255, 255]


def test_one_bit_is_refused_and_the_advice_works(tmp_path: Path) -> None:
    mask = np.zeros(SIZE, bool)
    mask[:100] = True
    tifffile.imwrite(tmp_path / "IN.tif", mask, photometric="minisblack", bitspersample=1, rowsperstrip=64)
    with pytest.raises(SlideError, match="1 × 1 bit MINISBLACK") as caught:
        open_source(tmp_path / "IN.tif")
    (code,) = re.findall(r'python -c "(.*)"$', str(caught.value))
    exec(code.replace("IN.tif", str(tmp_path / "IN.tif")).replace("OUT.tif", str(tmp_path / "OUT.tif")))
    assert shown(tmp_path / "OUT.tif")[[50, 200], 0, 0].tolist() == [255, 0]


def test_a_tiled_page_that_leaves_out_its_bits_is_of_one_bit(tmp_path: Path) -> None:
    """1 is the default of the tag, which OpenSlide requires."""
    tifffile.imwrite(tmp_path / "IN.tif", np.eye(256, dtype=bool), photometric="miniswhite", **TILED)
    with pytest.raises(SlideError, match="1 × 1 bit MINISWHITE") as caught:
        open_source(tmp_path / "IN.tif")
    (code,) = re.findall(r'python -c "(.*)"$', str(caught.value))
    exec(code.replace("IN.tif", str(tmp_path / "IN.tif")).replace("OUT.tif", str(tmp_path / "OUT.tif")))
    assert shown(tmp_path / "OUT.tif")[[50, 50], [50, 51], 0].tolist() == [0, 255]


@pytest.mark.parametrize(("photometric", "samples"), [("cielab", 3), ("minisblack", 5)])
def test_colours_without_a_known_conversion_have_no_command(tmp_path: Path, photometric: str, samples: int) -> None:
    image = np.zeros((*SIZE, samples), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric=photometric, planarconfig="contig", **STRIPED)
    with pytest.raises(SlideError, match=r"Export it as 8-bit RGB from the program that wrote it$"):
        open_source(tmp_path / "a.tif")


@pytest.mark.parametrize("how", [TILED, STRIPED], ids=["tiled", "striped"])
@pytest.mark.parametrize("scale", [257, 256, 1])
def test_a_palette_is_read(tmp_path: Path, how: dict[str, object], scale: int) -> None:
    """Tables of colours have 16 bits; some programs write 8 of them, in the upper or in the lower half."""
    image = smooth(*SIZE)[..., 0]
    colours = np.random.default_rng(0).integers(0, 256, (3, 256))
    colours[:, 0] = 255
    tifffile.imwrite(
        tmp_path / "a.tif", image, photometric="palette", colormap=(colours * scale).astype(np.uint16), **how
    )
    assert np.array_equal(shown(tmp_path / "a.tif"), colours.T[image])


@pytest.mark.parametrize("name", ["a.tif", "a.ome.tif"])
def test_orientation_is_that_of_the_slides_own_page(tmp_path: Path, name: str) -> None:
    image, label = smooth(*SIZE), smooth(130, 140, seed=9)
    for turned in (0, 1):
        with tifffile.TiffWriter(tmp_path / name) as tiff:
            for k, picture in enumerate((label, image)):
                tag = [(274, "H", 1, 3 if k == turned else 1, True)]
                tiff.write(picture, photometric="rgb", extratags=tag, **TILED)
        assert np.array_equal(shown(tmp_path / name), image[::-1, ::-1] if turned else image)
