"""Tiles in all the ways that scanners encode them: both readers show the same, and what is damaged is never shown."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import imagecodecs
import numpy as np
import pytest
import tifffile

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.source_level import RGB, BadTile
from pathology.readers.sources import open_source
from pathology.readers.tiff_source import TiffSource
from pathology.readers.tile_decoders import make_decoder
from tests.pathology.readers.scanners import (
    abbreviated,
    jpeg,
    jpeg_2000,
    leave_out,
    smooth,
    tiles_of,
    write_encoded,
    write_ndpi,
)

SIZE = (300, 420)
WHOLE = Box.of_size(*SIZE)
EXTRA = {"associated": "assocalpha", "unassociated": "unassalpha"}


def pyramid() -> list[np.ndarray]:
    image = smooth(*SIZE)
    return [image, np.ascontiguousarray(image[::2, ::2])]


def colours(stored: str) -> dict[str, object]:
    return {"compressionargs": {"outcolorspace": "rgb"}} if stored == "rgb" else {}


def same_as_openslide(path: Path) -> TiffSource:
    fast, slow = open_source(path), OpenSlideSource(path)
    assert isinstance(fast, TiffSource) and fast.vendor == slow.vendor
    assert (fast.mpp, fast.objective_power) == (slow.mpp, slow.objective_power)
    assert [(v.height_px, v.width_px, v.downsample) for v in fast.levels] == [
        (v.height_px, v.width_px, v.downsample) for v in slow.levels
    ]
    for level, size in enumerate(fast.levels):
        box = Box.of_size(size.height_px, size.width_px)
        assert np.array_equal(fast.read(box, level), slow.read(box, level))
    return fast


@pytest.mark.parametrize("stored", ["rgb", "ycbcr"])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("tables", ["inside", "apart"])
def test_jpeg_colours_are_those_that_the_tiff_states(
    tmp_path: Path, stored: str, subsampling: str, tables: str
) -> None:
    def encode(tile: np.ndarray) -> bytes:
        whole = jpeg(tile, stored, subsampling)
        return whole if tables == "inside" else abbreviated(whole)[1]

    apart = abbreviated(jpeg(smooth(128, 128), stored, subsampling))[0] if tables == "apart" else None
    path = write_encoded(tmp_path / "a.svs", pyramid(), encode, "jpeg", stored, tables=apart, **colours(stored))
    source = same_as_openslide(path)
    assert source.mpp == (0.2528, 0.2528), "a decimal comma"
    assert np.abs(source.read(WHOLE, 0).astype(int) - pyramid()[0]).mean() < (9 if stored == "rgb" else 4)


@pytest.mark.parametrize("claims", [0, 1])
@pytest.mark.parametrize("jfif", [False, True])
def test_a_tile_that_claims_other_colours_is_not_believed(tmp_path: Path, claims: int, jfif: bool) -> None:
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([claims])
    app0 = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00" if jfif else b""
    path = write_encoded(
        tmp_path / "a.svs", pyramid(), lambda t: b"\xff\xd8" + app0 + adobe + jpeg(t, "ycbcr")[2:], "jpeg", "ycbcr"
    )
    source = same_as_openslide(path)
    assert np.abs(source.read(WHOLE, 0).astype(int) - pyramid()[0]).mean() < 4


@pytest.mark.parametrize(("compression", "ycbcr"), [(33003, True), (33005, False)])
def test_jpeg_2000_of_aperio(tmp_path: Path, compression: int, ycbcr: bool) -> None:
    encode = partial(jpeg_2000, ycbcr=ycbcr)
    same_as_openslide(write_encoded(tmp_path / "a.svs", pyramid(), encode, compression, "ycbcr" if ycbcr else "rgb"))


@pytest.mark.parametrize("aperio", [True, False])
def test_what_openslide_cannot_unpack_is_read_all_the_same(tmp_path: Path, aperio: bool) -> None:
    image = pyramid()[0]
    path = write_encoded(tmp_path / "a.svs", [image], partial(jpeg_2000, ycbcr=False), 34712, "rgb", aperio=aperio)
    source = open_source(path)
    assert source.mpp == ((0.2528, 0.2528) if aperio else None)
    assert np.abs(source.read(WHOLE, 0).astype(int) - image).mean() < 2


@pytest.mark.parametrize("compression", ["none", "lzw", "deflate", "zstd", "webp", "packbits"])
@pytest.mark.parametrize("predictor", [False, True])
@pytest.mark.parametrize("tiled", [True, False])
def test_lossless_codecs_give_the_picture(tmp_path: Path, compression: str, predictor: bool, tiled: bool) -> None:
    if predictor and compression in ("none", "webp", "packbits"):
        pytest.skip("has no predictor")
    how = {} if compression == "none" else {"compression": compression, "predictor": predictor}
    if compression == "webp":
        how = {"compression": "webp", "compressionargs": {"lossless": True}}
    shape = {"tile": (128, 128)} if tiled else {"rowsperstrip": 77}
    image = smooth(*SIZE)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", **how, **shape)
    source = open_source(tmp_path / "a.tif")
    assert np.array_equal(source.read(WHOLE, 0), image)
    assert np.array_equal(source.read(Box(70, 233, 3, 401), 0), image[70:233, 3:401])


@pytest.mark.parametrize("kind", ["unassociated", "associated"])
def test_transparency_shows_white_glass(tmp_path: Path, kind: str) -> None:
    colour, alpha = smooth(*SIZE), np.linspace(0, 255, SIZE[1]).astype(np.uint8)[None, :].repeat(SIZE[0], 0)
    share = alpha[..., None] / 255
    kept = colour if kind == "unassociated" else np.rint(colour * share).astype(np.uint8)
    image = np.concatenate([kept, alpha[..., None]], 2)
    for name in ("a.tif", "a.ome.tif"):
        tifffile.imwrite(
            tmp_path / name, image, photometric="rgb", extrasamples=[EXTRA[kind]], tile=(128, 128), metadata=None
        )
        found = open_source(tmp_path / name).read(WHOLE, 0)
        assert np.abs(found - (colour * share + 255 * (1 - share))).max() <= 1.51


def test_colours_brighter_than_their_opacity_are_white_not_dark(tmp_path: Path) -> None:
    image = np.full((*SIZE, 4), 200, np.uint8)
    image[..., 3] = 0
    tifffile.imwrite(
        tmp_path / "a.tif", image, photometric="rgb", extrasamples=[EXTRA["associated"]], tile=(128, 128), metadata=None
    )
    assert open_source(tmp_path / "a.tif").read(WHOLE, 0).min() == 255


@pytest.mark.parametrize(("level", "aperio"), [(0, True), (0, False), (1, True)])
def test_tiles_that_the_scanner_left_out_are_shown_as_openslide_shows_them(
    tmp_path: Path, level: int, aperio: bool
) -> None:
    encode = partial(jpeg, stored="ycbcr")
    path = write_encoded(tmp_path / "a.tif", pyramid(), encode, "jpeg", "ycbcr", aperio=aperio)
    source = same_as_openslide(leave_out(path, level, 1))
    spread = int(level == 1 or aperio)  # a gap under a coarser tile makes OpenSlide doubt that one, too
    assert [v.missing_tiles for v in source.levels] == [int(level == 0), spread]
    bad: list[BadTile] = []
    out = np.empty((*SIZE, 3), np.uint8)
    source.read_into(WHOLE, 0, out, bad)
    assert not bad
    if level == 0:
        assert (out[:128, 128:256] == 255).all()


def test_a_left_out_tile_of_a_coarser_level_shows_the_finer_one(tmp_path: Path) -> None:
    levels = [*pyramid(), np.ascontiguousarray(pyramid()[0][::4, ::4])]
    path = write_encoded(tmp_path / "a.tif", levels, partial(jpeg, stored="ycbcr"), "jpeg", "ycbcr", aperio=False)
    for level, index in ((0, 1), (1, 0)):
        leave_out(path, level, index)
    with closing(TiffSource(path)) as source:
        sizes = [Box.of_size(level.height_px, level.width_px) for level in source.levels]
        finest, middle, coarsest = (source.read(size, k) for k, size in enumerate(sizes))
    assert (finest[:128, 128:256] == 255).all()
    wide = finest[:256, :256].reshape(128, 2, 128, 2, 3).mean((1, 3))
    assert np.abs(middle[:128, :128] - wide).max() <= 0.51 and (middle[:64, 64:128] == 255).all()
    assert coarsest[:64, 32:64].std() > 10, "stored, so shown as stored"
    with tifffile.TiffFile(path) as tiff:
        at, length = tiff.pages[0].dataoffsets[0], tiff.pages[0].databytecounts[0]
    damage_in_file(path, at, length, "all zero")
    bad, out = list[BadTile](), np.empty((150, 210, 3), np.uint8)
    with closing(TiffSource(path)) as source:
        source.read_into(Box.of_size(150, 210), 1, out, bad)
    assert [tile.box for tile in bad] == [Box(0, 128, 0, 128)] and (out[:128, :128] == 255).all(), "it cannot be shown"


def test_a_left_out_tile_that_cannot_be_filled_in_is_a_bad_tile(tmp_path: Path) -> None:
    path = write_encoded(tmp_path / "a.tif", pyramid(), partial(jpeg, stored="ycbcr"), "jpeg", "ycbcr")
    leave_out(path, 0, 1)

    def fail(box: Box, level: int, out: RGB) -> None:
        out[...] = 0
        raise TileError("OpenSlide cannot decode it")

    source, bad = TiffSource(path, fill_missing=fail), list[BadTile]()
    out = np.empty((*SIZE, 3), np.uint8)
    source.read_into(WHOLE, 0, out, bad)
    assert [tile.box for tile in bad] == [Box(0, 128, 128, 256)] and (out[:128, 128:256] == 255).all()
    with pytest.raises(TileError, match="OpenSlide cannot decode it"):
        source.read(WHOLE, 0)


@pytest.mark.parametrize("compression", [None, "packbits"])
def test_the_files_header_is_never_shown_as_a_tile(tmp_path: Path, compression: str | None) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, smooth(*SIZE), photometric="rgb", tile=(128, 128), compression=compression)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        tag = tiff.pages[0].tags["TileOffsets"]
        tag.overwrite([*tag.value[:1], 0, *tag.value[2:]])
    with closing(open_source(path)) as source:
        assert isinstance(source, TiffSource)
        assert_all_but_one_tile_is_read(source, smooth(*SIZE), Box(0, 128, 128, 256))
        with pytest.raises(TileError, match="the file states no place of the tile, but"):
            source.read(WHOLE, 0)


def damage(data: bytes, how: str) -> bytes:
    half, noise = len(data) // 2, np.random.default_rng(0).bytes(len(data))
    return {
        "garbage header": b"\x99" * 20 + data[20:],
        "zeroed tail": data[:half] + bytes(len(data) - half),
        "random tail": data[:half] + noise[half:],
        "no end": data[:-2] + b"\0\0",
        "all zero": bytes(len(data)),
        "all random": noise,
    }[how]


def damage_in_file(path: Path, offset: int, length: int, how: str) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = damage(bytes(data[offset : offset + length]), how)
    path.write_bytes(data)


def assert_all_but_one_tile_is_read(source: TiffSource, good: RGB, damaged: Box) -> None:
    """The damaged tile is named and white, the rest of the finest level is ``good``."""
    bad: list[BadTile] = []
    out = np.zeros_like(good)
    source.read_into(Box.of_size(*good.shape[:2]), 0, out, bad)
    assert [tile.box for tile in bad] == [damaged]
    expected = good.copy()
    expected[damaged.slices()] = 255
    assert np.array_equal(out, expected)


HEADS = ["garbage header", "all zero", "all random"]
TAILS = ["zeroed tail", "random tail", "no end"]
# zstd without its checksum and WebP have nothing in them that says what their last bytes were.
DAMAGE = [(codec, how) for codec in ("jpeg", "jpeg 2000", "deflate") for how in HEADS + TAILS]
DAMAGE += [(codec, how) for codec in ("zstd", "webp") for how in HEADS]


@pytest.mark.parametrize(("codec", "how"), DAMAGE)
def test_a_damaged_tile_is_named_with_its_place_and_all_others_are_read(tmp_path: Path, codec: str, how: str) -> None:
    image = smooth(*SIZE)
    path = tmp_path / "a.svs"
    if codec in ("deflate", "zstd", "webp"):
        tifffile.imwrite(path, image, photometric="rgb", compression=codec, tile=(128, 128))
    elif codec == "jpeg":
        write_encoded(path, [image], partial(jpeg, stored="ycbcr"), "jpeg", "ycbcr")
    else:
        write_encoded(path, [image], partial(jpeg_2000, ycbcr=False), 33005, "rgb")
    good = open_source(path).read(WHOLE, 0)
    with tifffile.TiffFile(path) as tiff:
        offset, length = tiff.pages[0].dataoffsets[6], tiff.pages[0].databytecounts[6]
    damage_in_file(path, offset, length, how)
    source = TiffSource(path)
    with pytest.raises(TileError, match="rows 128–256, columns 256–384"):
        source.read(WHOLE, 0)
    assert_all_but_one_tile_is_read(source, good, Box(128, 256, 256, 384))


def test_a_truncated_file_shows_what_is_there(tmp_path: Path) -> None:
    tiles = [jpeg(tile, "ycbcr") for tile in tiles_of(smooth(*SIZE), 128)]
    path = write_encoded(tmp_path / "a.svs", [smooth(*SIZE)], partial(jpeg, stored="ycbcr"), "jpeg", "ycbcr")
    good = open_source(path).read(WHOLE, 0)
    with tifffile.TiffFile(path) as tiff:
        last = tiff.pages[0].dataoffsets[len(tiles) - 1]
    path.write_bytes(path.read_bytes()[: last + 100])
    bad: list[BadTile] = []
    out = np.empty((*SIZE, 3), np.uint8)
    TiffSource(path).read_into(WHOLE, 0, out, bad)
    assert [tile.box for tile in bad] == [Box(256, 300, 384, 420)] and "bytes" in bad[0].reason
    assert np.array_equal(out[:256], good[:256]) and np.array_equal(out[:, :384], good[:, :384])


def test_a_header_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    def grown(tile: np.ndarray) -> bytes:
        data = jpeg(tile, "ycbcr")
        at = data.index(b"\xff\xc0") + 5
        return data[:at] + b"\xff\xdc\xff\xdc" + data[at + 4 :]

    path = write_encoded(tmp_path / "a.svs", [smooth(128, 128)], grown, "jpeg", "ycbcr")
    with pytest.raises(TileError):
        TiffSource(path).read(Box.of_size(128, 128), 0)


def test_one_huge_block_is_refused_with_what_it_is(tmp_path: Path) -> None:
    image = np.zeros((9000, 9000, 3), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", compression="zstd", rowsperstrip=9000)
    with pytest.raises(SlideError, match="not tiled"):
        open_source(tmp_path / "a.tif")


def test_a_large_uncompressed_strip_is_read_in_parts(tmp_path: Path) -> None:
    image = smooth(2000, 900)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", rowsperstrip=1100)
    source = open_source(tmp_path / "a.tif")
    assert source.levels[0].tile_px[0] < 400
    assert np.array_equal(source.read(Box(900, 1999, 10, 800), 0), image[900:1999, 10:800])


def test_a_damaged_height_is_not_split_into_its_rows(tmp_path: Path) -> None:
    """1,000,003 is a prime, so that no parts of several rows are equal; near 2^31 they would take gigabytes."""
    tifffile.imwrite(tmp_path / "a.tif", smooth(64, 64), photometric="rgb", rowsperstrip=64)
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
        for name in ("ImageLength", "RowsPerStrip"):
            tiff.pages[0].tags[name].overwrite(1_000_003, dtype="I")
    with pytest.raises(SlideError, match="1,000,003 rows in strips of 1,000,003 would be read in 1,000,003 parts"):
        open_source(tmp_path / "a.tif")


@pytest.mark.parametrize(("compression", "samples"), [(6, 3), (7, 4)])
def test_jpeg_that_no_strict_decoder_knows_is_refused(compression: int, samples: int) -> None:
    page = SimpleNamespace(compression=compression, samplesperpixel=samples, photometric=2, bitspersample=8)
    page.planarconfig, page.jpegheader, page.fillorder, page.sampleformat, page.index = 1, None, 1, 1, 0
    with pytest.raises(SlideError, match="cannot be checked"):
        make_decoder(page, 256, 256)


def test_codecs_that_this_needs_are_there() -> None:
    for name in ("JPEG2K", "WEBP", "ZSTD", "DEFLATE", "LZW"):
        assert getattr(imagecodecs, name).available, name


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2"])
def test_an_ndpi_is_read_block_by_block_between_its_restart_markers(tmp_path: Path, subsampling: str) -> None:
    image = smooth(512, 1024)
    small = np.ascontiguousarray(image[::4, ::4])
    path = write_ndpi(tmp_path / "a.ndpi", [image, small], subsampling=subsampling)
    fast, slow = open_source(path), OpenSlideSource(path)
    assert isinstance(fast, TiffSource) and fast.vendor == "hamamatsu"
    assert (fast.mpp, fast.objective_power) == ((0.25, 0.25), 40.0)
    assert [v.downsample for v in fast.levels] == [(1, 1), (4, 4)], "those that OpenSlide adds are left to our filter"
    assert fast.levels[0].tile_px == (8, 256)
    for level, other in ((0, 0), (1, [v.downsample for v in slow.levels].index((4, 4)))):
        size = fast.levels[level]
        box = Box.of_size(size.height_px, size.width_px)
        assert np.array_equal(fast.read(box, level), slow.read(box, other))
    assert np.abs(fast.read(Box.of_size(512, 1024), 0).astype(int) - image).mean() < 4


@pytest.mark.parametrize("how", ["zeroed tail", "random tail", "all zero", "all random"])
def test_a_damaged_block_of_an_ndpi_is_named(tmp_path: Path, how: str) -> None:
    path = write_ndpi(tmp_path / "a.ndpi", [smooth(256, 1024)])
    whole = Box.of_size(256, 1024)
    good = open_source(path).read(whole, 0)
    with tifffile.TiffFile(path) as tiff:
        offset, length = tiff.pages[0].dataoffsets[41], tiff.pages[0].databytecounts[41]
    damage_in_file(path, offset, length, how)
    source = open_source(path)
    assert isinstance(source, TiffSource)
    assert_all_but_one_tile_is_read(source, good, Box(80, 88, 256, 512))
