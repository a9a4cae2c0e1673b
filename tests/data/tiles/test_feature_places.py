"""Features on their slides: where their tiles are, and features of other slides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from data.samples.dataset import SlideDataset, SlideRef
from data.store.slide_store import SlideStore
from data.tiles.bags import tissue_seen
from data.tiles.features.bags import FeatureBags, check_sides
from data.tiles.features.placed import check_slide, level0_corners, placed_tiles, tile_um
from data.tiles.features.stored import StoredFeatures
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import TissueTiles, read_only, tissue_tiles
from hyfi_core.errors import RequestError
from pathology.predict.tiles.tile_heatmap import TileValues, place_tiles
from tests.data.tiles.stored import SOURCE, write_slide


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> SlideStore:
    """4301 × 1101 px of 1 µm, from (40, 7) of a slide of 0.4 µm."""
    mask = np.random.default_rng(8).random((138, 538)) > 0.6
    return write_slide(tmp_path_factory.mktemp("store"), "s", mask)


def write(path: Path, corners: np.ndarray, **attributes: object) -> StoredFeatures:
    """Write features as TRIDENT does; corners (y, x) in level-0 pixels."""
    with h5py.File(path, "w") as file:
        file["features"] = np.arange(len(corners) * 2, dtype=np.float32).reshape(-1, 2)
        coords = file.create_dataset("coords", data=corners[:, ::-1])
        coords.attrs.update(attributes)
    return StoredFeatures.of(path)


def of_tiles(path: Path, tiles: TissueTiles, **attributes: object) -> StoredFeatures:
    side = round(tiles.source_size_px[0])
    return write(path, tiles.coords, patch_size=tiles.size_px, patch_size_level0=side, **attributes)


@pytest.mark.parametrize(("mpp", "size", "stride"), [(None, 224, None), (2.0, 96, 48), (1.25, 100, 100)])
def test_tiles_are_where_they_were_cut(
    slide: SlideStore, tmp_path: Path, mpp: float | None, size: int, stride: int | None
) -> None:
    tiles = tissue_tiles(slide, Tiling(size, stride, mpp, 0.3))
    stored = of_tiles(tmp_path / "s.h5", tiles, level0_height=2793, level0_width=10760)
    check_slide(stored, slide)
    placed = placed_tiles(stored, slide)
    assert placed is not None
    assert np.array_equal(placed.corners, tiles.corners)
    assert placed.size_px == size and placed.square_px == (stride or size)
    assert tile_um(stored, slide) == pytest.approx(size * (mpp or 1.0), rel=0.01)


def test_tiles_anywhere_have_squares_of_a_quarter(slide: SlideStore, tmp_path: Path) -> None:
    corners = np.array([[40, 7], [40 + 560 + 130, 7 + 70]])  # 224 px of 1 µm are 560 of 0.4 µm
    placed = placed_tiles(write(tmp_path / "s.h5", corners, patch_size=224, patch_size_level0=560), slide)
    assert placed is not None and placed.square_px == 56
    assert placed.corners.tolist() == [[0, 0], [276, 28]]
    values = TileValues(np.zeros(1), np.array([[0.25, 1.0]]), np.array([[16.0, 32.0]]), None)
    heatmap = place_tiles(placed, values, ["a"], False)
    assert np.isfinite(heatmap.scores[0]).sum() == 32  # (276, 28) is at the square (5, 1)
    assert np.nansum(heatmap.values[0, :4, :4]) == 16 and np.nansum(heatmap.values[0, 5:9, 1:5]) == 32


def test_a_store_may_be_coarser_than_tiles(slide: SlideStore, tmp_path: Path) -> None:
    corners = np.array([[40 + 280, 7], [40, 7 + 560]])
    placed = placed_tiles(write(tmp_path / "s.h5", corners, patch_size=224, patch_size_level0=280), slide)
    assert placed is not None
    assert placed.corners.tolist() == [[224, 0], [0, 448]] and placed.plane.mpp == (0.5, 0.5)
    assert placed.plane.size_px == (2202, 8602)
    assert placed.level_box(placed.corners[0]).shape == (112, 112)


def test_positions_in_micrometres(slide: SlideStore, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["feats"], file["coords"] = np.zeros((1, 2), np.float16), np.array([[7 * 0.4 + 224, 40 * 0.4]])
        file.attrs.update({"unit": "um", "tile_size_um": 224.0, "tile_size_px": 112})
    stored = StoredFeatures.of(tmp_path / "s.h5")
    placed = placed_tiles(stored, slide)
    assert placed is not None and placed.corners.tolist() == [[0, 112]]
    corners = level0_corners(stored, slide)
    assert corners is not None and np.allclose(corners, [[40, 7 + 560]])


def test_features_of_other_slides_are_refused(slide: SlideStore, tmp_path: Path) -> None:
    inside = np.array([[40, 7]])
    other = write(tmp_path / "other.h5", inside, level0_height=2793, level0_width=9000)
    with pytest.raises(RequestError, match=r"its slide has 2793 × 9000 px at level 0, but slide s .* 2793 × 10760"):
        check_slide(other, slide)
    far = write(tmp_path / "far.h5", np.array([[40, 7], [3000, 7]]))
    with pytest.raises(RequestError, match=r"1 of 2 tiles are beyond slide s .* at \(y, x\) = \(3000, 7\)"):
        check_slide(far, slide)
    with pytest.raises(RequestError, match=r"not of one resolution, which is 256 × 256 µm.*\n  slide c: tiles of 128"):
        check_sides({"a": 256.0, "b": 256.0, "c": 128.0})
    assert SOURCE["bounds"]["y1"] == 2793


def test_missing_slides_are_named(slide: SlideStore, tmp_path: Path) -> None:
    write_slide(tmp_path, "t", np.ones((138, 538), bool))
    stored = write(tmp_path / "t.h5", np.array([[40, 7]]))
    dataset = SlideDataset(tmp_path, [SlideRef("t")], size_px=1, mpp=1.0)
    bags = FeatureBags(dataset, {"t": stored})
    assert bags.count(0) == 1 and torch.equal(bags.of(0, 3).read([0])[0, :, 0, 0], torch.tensor([0.0, 1.0]))
    assert 0 < bags.check()[0]["coverage"] < 1
    with pytest.raises(RequestError, match=r"1 slide has no features in .*named after slides, such as s\):\n  slide t"):
        FeatureBags(dataset, {"s": stored})
    with pytest.raises(RequestError, match=r"slide t: no tissue"):
        FeatureBags(dataset, {"s": stored}, {"t": "no tissue"})
    assert FeatureBags(dataset, {"t": replace(stored, unit=None)}).coverage(0) is None


def test_rows_of_a_tensor_file_are_read_alone(tmp_path: Path) -> None:
    vectors = torch.randn(2000, 64)
    for old in (False, True):
        torch.save(vectors, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        stored = StoredFeatures.of(tmp_path / "a.pt")
        assert np.array_equal(stored.vectors([3, 1999]), vectors[[3, 1999]].numpy())


def test_of_a_tile_that_begins_outside_the_stored_slide_the_part_inside_counts(slide: SlideStore) -> None:
    mask, mask_mpp = slide.tissue()
    plane = tissue_tiles(slide, Tiling(224)).plane
    for y, x in ((-112, 0), (40, -112), (-500, 0), (0, -500)):  # the last two are outside altogether
        corner = read_only(np.array([[y, x]]))
        tiles = TissueTiles("s", 224, 224, plane, corner, read_only(np.ones(1)), ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)))
        rows, columns = (
            (np.arange(length) + 0.5) * coarse / mpp
            for length, coarse, mpp in zip(mask.shape, mask_mpp, plane.mpp, strict=True)
        )
        inside = ((rows >= y) & (rows < y + 224))[:, None] & ((columns >= x) & (columns < x + 224))
        assert tissue_seen(mask, mask_mpp, tiles)[0] == (mask & inside).sum() / mask.sum()
