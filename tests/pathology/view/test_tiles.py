from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.readers.source_level import RGB
from pathology.readers.sources import open_source
from pathology.tissue.outlines import SlideGrid
from pathology.view.byte_cache import ByteCache
from pathology.view.pixels import FilePixels, ShownLevel, ShownSlide, StoredPixels, TissueMask
from pathology.view.scene import jpeg, png
from pathology.view.tiles import TILE_PX, TileCutter, TileGrid
from tests.pathology.tiffs import MakeSlide, stained, write_slide


def whole_zoom(slide: ShownSlide, zoom: int, cache_bytes: int = 10**8) -> RGB:
    """Return all tiles of a zoom put together."""
    cutter, grid = TileCutter(ByteCache(cache_bytes)), TileGrid.of(slide)
    height, width = grid.size_px(zoom)
    rows = []
    for row in range(-(-height // TILE_PX)):
        tiles = [cutter.cut(slide, "a", zoom, row, column) for column in range(-(-width // TILE_PX))]
        assert all(tile is not None and tile.shape == (TILE_PX, TILE_PX, 3) for tile in tiles)
        rows.append(np.concatenate(tiles, axis=1))  # type: ignore[arg-type]
    return np.concatenate(rows)[:height, :width]


@pytest.mark.parametrize("levels", [1, 3])
def test_tiles_of_the_finest_zoom_are_the_readers_own_pixels(make_slide: MakeSlide, levels: int) -> None:
    path = make_slide(size=(701, 903), levels=levels)
    source = open_source(path)
    slide = FilePixels(path)
    expected = source.read(Box.of_size(701, 903), 0)
    assert np.array_equal(whole_zoom(slide, TileGrid.of(slide).finest_zoom), expected)


def test_tiles_of_a_store_are_its_own_pixels_at_every_level(make_slide: MakeSlide, tmp_path: Path) -> None:
    path = make_slide(size=(1301, 1703))
    assert ingest_slide(path, tmp_path, IngestOptions(mpp=0.5), {}, "a").status == "done"
    slide, store = StoredPixels(tmp_path / "a.zarr"), SlideStore.open(tmp_path / "a.zarr")
    finest = TileGrid.of(slide).finest_zoom
    for level, size in enumerate(store.levels[:3]):
        expected = store.read(Box.of_size(size.height_px, size.width_px), level).transpose(1, 2, 0)
        assert np.array_equal(whole_zoom(slide, finest - level), expected)


@pytest.mark.parametrize("levels", [1, 2])
def test_coarser_tiles_are_means_of_the_slide(tmp_path: Path, levels: int) -> None:
    image = np.random.default_rng(0).integers(0, 255, (2048, 1024, 3), np.uint8)
    slide = FilePixels(write_slide(tmp_path / "a.tif", image, levels=levels))
    for zoom in range(TileGrid.of(slide).finest_zoom):
        factor = TileGrid.of(slide).scale(zoom)
        means = image.reshape(2048 // factor, factor, 1024 // factor, factor, 3).mean((1, 3))
        assert np.abs(whole_zoom(slide, zoom) - means).max() <= 1.5  # each halving rounds


class Drawn:
    """A slide without a pyramid whose pixels say where they are; counts how much is read at a time."""

    def __init__(self, side_px: int) -> None:
        self.levels = (ShownLevel(side_px, side_px, (1.0, 1.0), (512, 512)),)
        self.mpp: tuple[float, float] | None = (0.25, 0.25)
        self.to_level0, self.facts = SlideGrid(np.eye(2, 3)), ()
        self.largest_px = self.reads = 0

    def read(self, box: Box, level: int) -> RGB:
        self.reads += 1
        self.largest_px = max(self.largest_px, box.area)
        out: RGB = np.zeros((*box.shape, 3), np.uint8)
        out[..., 0] = (np.arange(box.y0, box.y1) * 255 // self.levels[0].height_px)[:, None]
        out[..., 1] = np.arange(box.x0, box.x1) * 255 // self.levels[0].width_px
        return out

    def tissue(self) -> TissueMask | None:
        return None

    def close(self) -> None:
        pass


def test_a_slide_without_a_pyramid_is_shown_whole_from_small_reads() -> None:
    slide = Drawn(256 * 16 + 8)
    cache = ByteCache(2_000_000)
    tile = TileCutter(cache).cut(slide, "a", 0, 0, 0)
    assert tile is not None and slide.largest_px <= 512 * 512
    side = TileGrid.of(slide).size_px(0)[0]
    expected = np.arange(side) * 32.0 * 255 / slide.levels[0].height_px
    assert np.abs(tile[:side, 0, 0] - expected).max() < 4
    assert (tile[side:] == 255).all()
    assert cache.held_bytes <= 2_000_000


def test_a_tile_beyond_the_slide_is_none() -> None:
    slide = Drawn(600)
    cutter = TileCutter(ByteCache(0))
    places = [(2, 3, 0), (2, 0, 3), (3, 0, 0), (-1, 0, 0), (2, -1, 0)]
    assert [cutter.cut(slide, "a", *place) for place in places] == [None] * len(places)
    assert slide.reads == 0


def test_what_cannot_be_decoded_is_striped_not_white(tmp_path: Path, make_slide: MakeSlide) -> None:
    path = make_slide(size=(512, 512), compression="zlib")
    data = bytearray(path.read_bytes())
    import tifffile

    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[0]  # type: ignore[union-attr]
    data[offset : offset + 20] = b"\xff" * 20
    path.write_bytes(data)
    slide = FilePixels(path)
    pixels = whole_zoom(slide, 1)
    assert {tuple(color) for color in pixels[:256, :256].reshape(-1, 3)} == {(214, 40, 120), (255, 255, 255)}
    assert np.array_equal(pixels[256:], stained(512, 512)[256:])


def test_the_cache_keeps_what_was_used_last_and_no_more_than_it_may() -> None:
    cache, made = ByteCache(300), []

    def make(name: str) -> np.ndarray:
        made.append(name)
        return np.zeros(100, np.uint8)

    for name in "abcadbe":
        cache.get(name, lambda name=name: make(name))  # type: ignore[misc]
        assert cache.held_bytes <= 300
    assert made == list("abcdbe")  # a was used again before d came, b was not
    with pytest.raises(ValueError, match="read-only"):
        cache.get("e", lambda: make("e"))[0] = 1
    cache.get("large", lambda: np.zeros(1000, np.uint8))
    assert cache.held_bytes == 300


def test_png_is_exact_and_jpeg_is_near() -> None:
    pixels = stained(256, 256)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)
    assert np.abs(np.asarray(Image.open(io.BytesIO(jpeg(pixels)))).astype(int) - pixels).mean() < 6
