from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import simplejpeg
import tifffile

from data.samples.dataset import SlideDataset, SlideRef
from data.store.slide_store import SlideStore, slide_path
from data.store.writer import SlideWriter
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.ingest.lossless import LosslessSlide, TileJoiner
from pathology.readers.sources import open_source
from pathology.readers.tiff_source import TiffSource
from tests.pathology.tiffs import halved, stained, write_slide

TILE = 128
_SOS, _TABLES = 0xDA, (0xDB, 0xC4)


def split_tables(jpeg: bytes) -> tuple[bytes, bytes]:
    """Return (a JPEG of tables alone, the tile without them and without APP markers), as Aperio writes them."""
    tables, rest, at = [b"\xff\xd8"], [b"\xff\xd8"], 2
    while True:
        marker, end = jpeg[at + 1], at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if marker in _TABLES:
            tables.append(jpeg[at:end])
        elif marker not in (0xE0, 0xEE):
            rest.append(jpeg[at:end])
        at = end
        if marker == _SOS:
            return b"".join([*tables, b"\xff\xd9"]), b"".join([*rest, jpeg[at:]])


def encode(pixels: np.ndarray, rgb: bool) -> bytes:
    space = {"colorspace": "RGB", "outcolorspace": "RGB" if rgb else "YCBCR"}
    return bytes(
        imagecodecs.jpeg8_encode(np.ascontiguousarray(pixels), level=85, subsampling="444" if rgb else "420", **space)
    )


def tiles_of(image: np.ndarray, rgb: bool) -> Iterator[bytes]:
    for y in range(0, image.shape[0], TILE):
        for x in range(0, image.shape[1], TILE):
            tile = image[y : y + TILE, x : x + TILE]
            missing = ((0, TILE - tile.shape[0]), (0, TILE - tile.shape[1]), (0, 0))
            yield encode(np.pad(tile, missing, mode="edge"), rgb)


def write_jpeg_slide(
    path: Path, rgb: bool, shared: bool, damage: dict[int, bytes] | None = None, levels: int = 2
) -> Path:
    """Write a pyramid of 700 × 900 px in JPEG tiles; ``damage`` replaces tiles of the finest level."""
    image = stained(700, 900)
    with tifffile.TiffWriter(path) as tiff:
        for level in range(levels):
            tiles = list(tiles_of(image, rgb))
            tables = None
            if shared:
                tables = split_tables(tiles[0])[0]
                tiles = [split_tables(tile)[1] for tile in tiles]
            if level == 0:
                tiles = [(damage or {}).get(i, tile) for i, tile in enumerate(tiles)]
            tiff.write(
                iter(tiles),
                shape=image.shape,
                dtype="uint8",
                tile=(TILE, TILE),
                photometric="rgb" if rgb else "ycbcr",
                compression="jpeg",
                jpegtables=tables,
                subfiletype=1 if level else 0,
                resolution=(2e4, 2e4),
                resolutionunit="CENTIMETER",
                metadata=None,
            )
            image = halved(image)
    return path


def copied(path: Path, store: Path, max_bad: float = 0.0) -> tuple[SlideStore, TiffSource, list[str]]:
    slide = open_source(path)
    assert isinstance(slide, TiffSource)
    tiles = LosslessSlide(slide)
    tiles.check()
    store.mkdir(exist_ok=True)
    with SlideWriter(store, "s", tiles.stored_levels((0.5, 0.5))) as writer:
        done = tiles.copy(writer, max_bad)
        writer.write_tissue(np.ones((44, 57), bool), 8.0)
        writer.publish({"kind": "source"})
    return SlideStore.open(slide_path(store, "s")), slide, done.bad


@pytest.mark.parametrize("rgb", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_every_pixel_of_every_level_is_the_sources(tmp_path: Path, rgb: bool, shared: bool) -> None:
    path = write_jpeg_slide(tmp_path / "a.tiff", rgb, shared)
    store, slide, _ = copied(path, tmp_path / "store")
    assert [(v.height_px, v.width_px, v.mpp) for v in store.levels] == [(700, 900, (0.5, 0.5)), (350, 450, (1.0, 1.0))]
    for k, level in enumerate(store.levels):
        box = Box.of_size(level.height_px, level.width_px)
        assert np.array_equal(store.read(box, k, threads=2), slide.read(box, k).transpose(2, 0, 1))
    assert np.array_equal(
        store.read(Box(690, 720, 880, 910))[:, :10, :20], slide.read(Box(690, 700, 880, 900), 0).transpose(2, 0, 1)
    )


@pytest.mark.parametrize("rgb", [True, False])
def test_a_stored_tile_is_a_jpeg_that_anybody_decodes_to_the_same_pixels(tmp_path: Path, rgb: bool) -> None:
    from PIL import Image

    path = write_jpeg_slide(tmp_path / "a.tiff", rgb, shared=True)
    store, slide, _ = copied(path, tmp_path / "store")
    shard = (store.path / "0/c/0/0/0").read_bytes()
    tile = shard[: shard.index(b"\xff\xd9") + 2]
    expected = slide.read(Box(0, TILE, 0, TILE), 0)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(tile)).convert("RGB")), expected)
    assert np.array_equal(imagecodecs.jpeg8_decode(tile), expected)
    coded = split_tables(next(tiles_of(stained(700, 900), rgb)))[1]
    assert tile.endswith(coded[coded.index(b"\xff\xda") :])


def test_zarr_python_reads_it_with_the_codec_that_it_names(tmp_path: Path) -> None:
    """imagecodecs registers `imagecodecs_jpeg` itself from Python 3.12 on; here the same is done by hand."""
    import asyncio

    import zarr
    from zarr.abc.codec import ArrayBytesCodec
    from zarr.registry import register_codec

    class JpegBytes(ArrayBytesCodec):
        is_fixed_size = False

        @classmethod
        def from_dict(cls, data: dict[str, object]) -> JpegBytes:
            assert data["name"] == "imagecodecs_jpeg"
            return cls()

        def to_dict(self) -> dict[str, object]:
            return {"name": "imagecodecs_jpeg"}

        async def _decode_single(self, chunk_bytes, chunk_spec):  # type: ignore[no-untyped-def]
            pixels = await asyncio.to_thread(imagecodecs.jpeg8_decode, chunk_bytes.to_bytes())
            return chunk_spec.prototype.nd_buffer.from_numpy_array(pixels.reshape(chunk_spec.shape))

        def compute_encoded_size(self, input_byte_length, chunk_spec):  # type: ignore[no-untyped-def]
            raise AssertionError("only a sharded store asks for it")

    register_codec("imagecodecs_jpeg", JpegBytes)
    store, slide, _ = copied(write_jpeg_slide(tmp_path / "a.tiff", True, True), tmp_path / "store")
    group = zarr.open_group(store.path, mode="r")
    assert np.array_equal(group["0"][:], slide.read(Box(0, 700, 0, 900), 0).transpose(2, 0, 1))


GOOD = next(tiles_of(stained(700, 900), rgb=False))
DAMAGED = {
    "cut off": GOOD[: len(GOOD) // 2],
    "zeroed tail": GOOD[:200] + bytes(len(GOOD) - 200),
    "garbage header": b"garbage!" + GOOD[8:],
    "another size": encode(np.zeros((64, 64, 3), np.uint8), rgb=False),
    "grey": bytes(imagecodecs.jpeg8_encode(np.zeros((TILE, TILE), np.uint8))),
}


@pytest.mark.parametrize("kind", list(DAMAGED))
def test_a_damaged_tile_ends_the_slide_or_is_counted_and_white(tmp_path: Path, kind: str) -> None:
    path = write_jpeg_slide(tmp_path / "a.tiff", False, False, {9: DAMAGED[kind]})
    with pytest.raises(SlideError, match=r"1 of 48 tiles are damaged.*tile 9 of level 0: its JPEG"):
        copied(path, tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())
    store, _, bad = copied(path, tmp_path / "store", max_bad=0.05)
    assert len(bad) == 1
    assert (store.read(Box(128, 256, 128, 256)) == 255).all() and not (store.read(Box(128, 256, 256, 384)) == 255).all()


def test_a_tile_that_the_scanner_left_out_is_white(tmp_path: Path) -> None:
    path = write_jpeg_slide(tmp_path / "a.tiff", False, False, {47: b""})
    store, slide, bad = copied(path, tmp_path / "store")
    assert not bad and (store.read(Box(640, 700, 896, 900)) == 255).all()
    assert np.array_equal(
        store.read(Box(500, 700, 600, 900)), slide.read(Box(500, 700, 600, 900), 0).transpose(2, 0, 1)
    )


@pytest.mark.parametrize("compression", ["zlib", "webp"])
def test_other_slides_are_refused_with_what_they_are(tmp_path: Path, compression: str) -> None:
    path = write_slide(tmp_path / "a.tiff", stained(300, 300), compression=compression)
    with pytest.raises(SlideError, match=r"--lossless needs JPEG tiles; .* without --lossless"):
        LosslessSlide(open_source(path))


def test_tiles_that_would_look_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slide = open_source(write_jpeg_slide(tmp_path / "a.tiff", False, False))
    tiles = LosslessSlide(slide)
    monkeypatch.setattr(TiffSource, "read", lambda self, box, level: np.zeros((*box.shape, 3), np.uint8))
    with pytest.raises(SlideError, match="would differ from"):
        tiles.check()


def test_tiles_whose_headers_differ_are_each_read_anew() -> None:
    joiner = TileJoiner(b"\xff\xd8", (TILE, TILE))
    for quality in (50, 90, 50):
        tile = simplejpeg.encode_jpeg(np.ascontiguousarray(stained(TILE, TILE)), quality=quality)
        block = b"what stands before" + tile + b"\xff\xd9 and behind"
        head, at = joiner.join(block, 18, 18 + len(tile))
        assert np.array_equal(simplejpeg.decode_jpeg(head + block[at : 18 + len(tile)]), simplejpeg.decode_jpeg(tile))
    with pytest.raises(TileError, match="no end marker"):
        joiner.join(block, 18, 18 + len(tile) - 2)
    with pytest.raises(TileError, match="its JPEG header is damaged"):
        joiner.join(tile[:100])


@pytest.mark.slides
@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs", "atlas_breast-lobular_HE_10x.svs"])
def test_real_slides_are_copied_pixel_by_pixel(tmp_path: Path, real_slides: Path, name: str) -> None:
    store, slide, bad = copied(real_slides / name, tmp_path / "store")
    assert not bad
    for k, level in enumerate(store.levels):
        y, x = level.height_px // 2, level.width_px // 2
        for box in (
            Box(y - 300, y + 300, x - 300, x + 300),
            Box(level.height_px - 300, level.height_px, level.width_px - 300, level.width_px),
        ):
            assert np.array_equal(store.read(box, k), slide.read(box, k).transpose(2, 0, 1))


def test_training_takes_a_level_within_two_percent_of_the_mpp_it_wants(tmp_path: Path) -> None:
    _, slide, _ = copied(write_jpeg_slide(tmp_path / "a.tiff", False, True), tmp_path / "store")
    for mpp, level in ((0.505, 0), (0.985, 1)):
        dataset = SlideDataset(tmp_path / "store", [SlideRef("s")], size_px=256, mpp=mpp, view="crop", align_px=32)
        piece = dataset.view(0).pieces[0]
        assert dataset.level(0) == level
        shown = slide.read(piece.source, level).transpose(2, 0, 1)
        assert np.array_equal(dataset.read(0, piece.target), shown)
    with pytest.raises(RequestError, match=r"has levels of 0\.5, 1 "):
        SlideDataset(tmp_path / "store", [SlideRef("s")], size_px=256, mpp=0.52).level(0)
