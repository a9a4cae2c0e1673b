from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
from PIL import Image

from data.store.slide_store import SlideStore
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.plan.box import Box
from pathology.ingest.thumbnail import OUTLINE
from pathology.predict.cohort import predict_slides
from pathology.predict.colors import class_color
from pathology.predict.heatmap_tiff import channel_metadata, write_channels
from pathology.predict.inputs import find_inputs
from pathology.predict.options import PredictOptions
from pathology.view.gallery import Gallery
from pathology.view.layers import HeatmapFile, LayerError, interpolated, nearest
from pathology.view.scene import Scene
from pathology.view.show import show
from pathology.view.tiles import TILE_PX
from tests.pathology.slides import FOCUS, MPP, Darkness, member_of
from tests.pathology.view.predictions import SLIDE_ID


def picture(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def whole(scene: Scene, key: str, layer: str | None, zoom: int, smooth: bool = False) -> np.ndarray:
    """Return all tiles of a layer, or of the slide where ``layer`` is None, put together."""
    about = scene.about(key)
    scale = 2 ** (about["finest_zoom"] - zoom)
    height, width = -(-about["height_px"] // scale), -(-about["width_px"] // scale)

    def tile(row: int, column: int) -> np.ndarray:
        place = (zoom, row, column)
        return picture(scene.layer(key, layer, place, smooth) if layer else scene.tile(key, place, True))

    rows = range(-(-height // TILE_PX))
    columns = range(-(-width // TILE_PX))
    return np.concatenate([np.concatenate([tile(y, x) for x in columns], 1) for y in rows])[:height, :width]


def channel(scene: Scene, name: str) -> str:
    (found,) = (one["id"] for one in scene.about(SLIDE_ID)["layers"] if f"{one['kind']} {one['class_name']}" == name)
    return str(found)


@pytest.mark.parametrize("shown", ["file", "store"])
def test_the_score_lies_on_the_focus_that_it_saw(predictions: Path, shown: str) -> None:
    paths = [predictions] if shown == "file" else [predictions, predictions.parent / "store"]
    scene = Scene(Gallery.of(paths), 10**8)
    pixel_um = MPP if shown == "file" else 1.0
    assert scene.about(SLIDE_ID)["mpp"] == (pixel_um, pixel_um)
    finest = scene.about(SLIDE_ID)["finest_zoom"]
    y0, y1, x0, x1 = (round(edge * MPP / pixel_um) for edge in FOCUS)
    pixels = whole(scene, SLIDE_ID, None, finest)
    assert (pixels[y0:y1, x0:x1].max(2) < 100).all() and (pixels[y0:y1, x0 - 4].max(1) > 100).all()
    alpha = whole(scene, SLIDE_ID, channel(scene, "contribution dark"), finest)[..., 3]
    loudest = alpha == alpha.max()  # squares of 32 µm that hold the focus: across they are it, downwards it lies in two
    square_px = round(32 / pixel_um)
    top = y0 // square_px * square_px
    assert loudest[top : top + square_px, x0:x1].all() and np.flatnonzero(loudest.any(1))[0] == top
    assert np.flatnonzero(loudest.any(0))[[0, -1]].tolist() == [x0, x1 - 1]


@pytest.mark.parametrize("zoom", [0, 1, 2, 3])
def test_a_layers_pixel_is_the_square_under_its_centre(predictions: Path, zoom: int) -> None:
    scene = Scene(Gallery.of([predictions]), 10**8)
    about = scene.about(SLIDE_ID)
    drawn = whole(scene, SLIDE_ID, channel(scene, "score dark"), zoom)
    with tifffile.TiffFile(predictions / SLIDE_ID / "heatmap.tiff") as file:
        values = file.series[0].asarray()[1]
    square_px = 64  # 32 at 1 µm, on a slide of 0.5 µm
    scale = 2 ** (about["finest_zoom"] - zoom)
    assert scale <= square_px
    rows = ((np.arange(drawn.shape[0]) + 0.5) * scale / square_px).astype(int)
    columns = ((np.arange(drawn.shape[1]) + 0.5) * scale / square_px).astype(int)
    expected = np.rint(np.nan_to_num(values[rows][:, columns]) * 235)
    assert np.abs(drawn[..., 3] - expected).max() <= 1


def test_the_occlusion_of_a_slide_is_a_layer_in_its_place(predictions: Path, tmp_path: Path) -> None:
    """The block with the dark focus is where the output drops most; it is shown on the file, whose pixels are half."""
    slide = predictions.parent / f"{SLIDE_ID}.tiff"
    options = PredictOptions(evidence="occlusion", evidence_blocks=60)
    predict_slides([member_of(Darkness())], find_inputs([slide]), tmp_path / "out", AloneCommunicator(), options)
    scene = Scene(Gallery.of([tmp_path / "out"]), 10**8)
    kinds = [layer["kind"] for layer in scene.about(SLIDE_ID)["layers"]]
    assert kinds == ["score", "score", "contribution", "contribution", "drop", "drop"]
    drawn = whole(scene, SLIDE_ID, channel(scene, "drop dark"), scene.about(SLIDE_ID)["finest_zoom"])
    block_px = 2 * 64
    y, x = (edge // block_px * block_px for edge in (FOCUS[0], FOCUS[2]))
    loudest = drawn[..., 3] == drawn[..., 3].max()
    assert np.argwhere(loudest).min(0).tolist() == [y, x]
    assert np.argwhere(loudest).max(0).tolist() == [y + block_px - 1, x + block_px - 1]
    assert tuple(drawn[y, x, :3]) == class_color(1)


def test_a_heatmap_that_is_made_again_is_shown_anew(predictions: Path, tmp_path: Path) -> None:
    """The values of its first version stayed in the cache, under the metadata of the second."""
    out = shutil.copytree(predictions, tmp_path / "out")
    scene = Scene(Gallery.of([out]), 10**8)
    first = whole(scene, SLIDE_ID, channel(scene, "score dark"), 0)
    file = HeatmapFile(out / SLIDE_ID / "heatmap.tiff")
    facts = {"class_names": ["pale", "dark"], "cell_to_level0": file.grid.affine.tolist()}
    names = [channel_of_file.name for channel_of_file in file.channels]
    nothing = np.zeros((len(names), *file.values(0).shape), np.float32)
    write_channels(file.path, nothing, channel_metadata("a", "", names, (1.0, 1.0), facts, (0.0, 0.0)), (1.0, 1.0))
    assert first[..., 3].any() and not whole(scene, SLIDE_ID, channel(scene, "score dark"), 0)[..., 3].any()


def test_slides_of_predictions_with_the_same_name_all_have_their_key(predictions: Path, tmp_path: Path) -> None:
    """Of three runs whose folders are named alike, the second's slide was replaced by the third's."""
    folders = [shutil.copytree(predictions, tmp_path / run / "out") for run in "abc"]
    slides = Gallery.of(folders).slides
    assert list(slides) == [SLIDE_ID, f"{SLIDE_ID} (out)", f"{SLIDE_ID} (out 2)"]
    assert [slide.predictions for slide in slides.values()] == folders


def test_the_outline_surrounds_the_stores_tissue(predictions: Path) -> None:
    store = predictions.parent / "store"
    scene = Scene(Gallery.of([store]), 10**8)
    finest = scene.about(SLIDE_ID)["finest_zoom"]
    drawn = whole(scene, SLIDE_ID, "tissue", finest)
    mask, mpp = SlideStore.open(store / f"{SLIDE_ID}.zarr").tissue()
    assert mpp == (8.0, 8.0)
    inside = np.repeat(np.repeat(mask, 8, 0), 8, 1)[: drawn.shape[0], : drawn.shape[1]]
    line = drawn[..., 3] > 0
    assert {tuple(color) for color in drawn[line]} == {(*OUTLINE, 255)}
    padded = np.pad(inside, 2)
    near_glass = np.zeros_like(inside)
    for dy, dx in ((-2, 0), (2, 0), (0, -2), (0, 2)):
        near_glass |= ~padded[2 + dy : padded.shape[0] - 2 + dy, 2 + dx : padded.shape[1] - 2 + dx]
    assert line.any() and np.array_equal(line, inside & near_glass)


def test_between_squares_values_are_interpolated_and_unseen_ones_do_not_count() -> None:
    values = np.array([[0.0, 1.0], [np.nan, 3.0]], np.float32)
    rows, columns = np.array([[0.5], [1.0], [1.5]]), np.array([[0.5, 1.0, 1.5, 2.5]])
    assert np.array_equal(
        nearest(values, rows, columns)[:2],
        np.array([[0, 1, 1, np.nan], [np.nan, 3, 3, np.nan]], np.float32),
        equal_nan=True,
    )
    smooth = interpolated(values, rows, columns)
    assert smooth[0, :3].tolist() == [0.0, 0.5, 1.0] and smooth[2, 2] == 3.0
    assert np.isnan(smooth[2, 0]) and np.isnan(smooth[:, 3]).all()
    assert smooth[1, 2] == 2.0


def test_a_heatmap_that_does_not_say_where_it_lies_is_refused(predictions: Path, tmp_path: Path) -> None:
    path = tmp_path / "heatmap.tiff"
    metadata = {"axes": "CYX", "Channel": {"Name": ["score pale", "score dark"]}}
    tifffile.imwrite(path, np.zeros((2, 4, 4), np.float32), ome=True, photometric="minisblack", metadata=metadata)
    with pytest.raises(LayerError, match="predict again"):
        HeatmapFile(path)
    path.write_bytes(b"no TIFF")
    with pytest.raises(LayerError, match=r"heatmap\.tiff: cannot be read"):
        HeatmapFile(path)


def test_a_box_that_begins_within_a_pixel_of_a_level_is_shown_where_it_is() -> None:
    """The pixels of the level around it were shown as the box, up to a pixel of the picture away."""
    finest = np.broadcast_to((np.arange(64) * 3).astype(np.uint8), (3, 64, 64))
    levels = [finest, finest[:, ::2].reshape(3, 32, 32, 2).mean(3).astype(np.uint8)]
    slide = SimpleNamespace(
        levels=[SimpleNamespace(height_px=level.shape[1], width_px=level.shape[2]) for level in levels],
        read=lambda box, level: levels[level][(slice(None), *box.slices())],
    )
    picture = np.asarray(show(slide, Box(0, 22, 21, 43), tissue=False, size_px=11))  # type: ignore[arg-type]
    expected = 3 * (21.5 + 2 * np.arange(11))
    assert picture.shape == (11, 11, 3) and np.abs(picture[5, 1:-1, 0] - expected[1:-1]).max() <= 1


def test_regions_lie_where_the_focus_is(predictions: Path) -> None:
    for paths, pixel_um in (([predictions], MPP), ([predictions, predictions.parent / "store"], 1.0)):
        found = Scene(Gallery.of(paths), 0).regions(SLIDE_ID)["features"]
        regions = [one for one in found if "mean score" in one["properties"].get("measurements", {})]
        most = max(regions, key=lambda one: one["properties"]["measurements"]["contribution to the logit"])
        ring = np.array(most["geometry"]["coordinates"][0])
        box = Box(int(ring[:, 1].min()), int(ring[:, 1].max()), int(ring[:, 0].min()), int(ring[:, 0].max()))
        y0, y1, x0, x1 = (round(edge * MPP / pixel_um) for edge in FOCUS)
        assert box.contains(Box(y0, y1, x0, x1))
    assert json.loads((predictions / SLIDE_ID / "regions.geojson").read_text())["features"]
