from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.view import Piece, View
from hyfi_core.plan.box import Box
from pathology.predict.colors import class_color
from pathology.predict.heatmap import Heatmap, average, network_stride, place, pyramid, smoothed
from pathology.predict.heatmap_tiff import write_heatmap, write_score_picture

CLASSES = ("benign", "malignant µ")


def view_of(size_px: tuple[int, int], *pieces: tuple[tuple[int, int, int, int], tuple[int, int]]) -> View:
    made = []
    for (y0, y1, x0, x1), (ty, tx) in pieces:
        made.append(Piece(Box(y0, y1, x0, x1), Box(ty, ty + y1 - y0, tx, tx + x1 - x0)))
    return View(size_px, tuple(made), 1.0, 1, ())


def scores_of(squares: np.ndarray) -> np.ndarray:
    """What a square's own value says of it, 0 to 1."""
    return np.asarray(1 / (1 + np.exp(-squares)))


def put(contributions: np.ndarray, view: View, slide: tuple[int, int], align_px: int = 64) -> Heatmap:
    logits = contributions.sum((1, 2), dtype=np.float64) + np.array([0.25, -1.5])[: len(contributions)]
    return place(
        [contributions],
        [scores_of(contributions)],
        logits.tolist(),
        [view],
        align_px=align_px,
        slide_size_px=slide,
        mpp=(1.0, 0.5),
        class_names=CLASSES[: len(contributions)],
    )


def random_squares(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def test_squares_return_to_the_place_their_piece_was_cut_from() -> None:
    view = view_of((128, 192), ((64, 128, 64, 192), (0, 0)), ((192, 256, 0, 64), (64, 128)))
    squares = random_squares(2, 4, 6)
    heatmap = put(squares, view, (300, 250))
    assert heatmap.one_to_one
    assert heatmap.square_px == 32
    assert heatmap.values.shape == (2, 10, 8)
    background = (squares.sum((1, 2)) - squares[:, :2, :4].sum((1, 2)) - squares[:, 2:, 4:].sum((1, 2))) / 12
    np.testing.assert_allclose(heatmap.values[:, 2:4, 2:6], squares[:, :2, :4] + background[:, None, None], rtol=1e-5)
    np.testing.assert_allclose(heatmap.values[:, 6:8, 0:2], squares[:, 2:, 4:] + background[:, None, None], rtol=1e-5)
    assert heatmap.seen_squares.sum() == 12


def test_what_was_not_looked_at_is_nan_in_every_class() -> None:
    heatmap = put(random_squares(2, 4, 4), view_of((128, 128), ((64, 128, 0, 64), (0, 0))), (200, 200))
    assert np.isnan(heatmap.values[:, ~heatmap.seen_squares]).all()
    assert heatmap.seen_squares[2:4, :2].all()


def test_ragged_piece_at_the_slides_border_keeps_its_last_squares() -> None:
    heatmap = put(random_squares(1, 4, 4), view_of((128, 128), ((64, 100, 64, 71), (64, 64))), (100, 71))
    assert heatmap.values.shape == (1, 4, 3)
    assert heatmap.seen_squares.sum() == 2


def test_pieces_off_the_grid_go_where_the_centres_lie_and_say_so() -> None:
    view = view_of((128, 128), ((10, 74, 40, 104), (0, 0)))
    heatmap = put(random_squares(1, 4, 4), view, (200, 200))
    assert not heatmap.one_to_one
    assert heatmap.seen_squares[0:3, 1:4].sum() == 4
    np.testing.assert_allclose(np.nansum(heatmap.values) + heatmap.bias[0], heatmap.logits[0], rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    stride=st.sampled_from([1, 4, 16, 32, 48]),
    size=st.tuples(st.integers(64, 200), st.integers(64, 200)),
    cuts=st.integers(1, 2),
)
def test_sum_plus_bias_is_the_logit(stride: int, size: tuple[int, int], cuts: int) -> None:
    squares = random_squares(2, math.ceil(size[0] / stride), math.ceil(size[1] / stride))
    pieces = [((0, 64, 128, 192), (0, 0)), ((128, 128 + size[0] % 64 + 1, 0, 20), (0, 64))]
    if size[1] < 84 or size[0] < 64:
        cuts = 1
    heatmap = put(squares, view_of(size, *pieces[:cuts]), (260, 300))
    total = np.nansum(heatmap.values.astype(np.float64), axis=(1, 2)) + heatmap.bias
    tolerance = 1e-5 * np.abs(squares).sum(dtype=np.float64)
    np.testing.assert_allclose(total, heatmap.logits, atol=tolerance)
    np.testing.assert_allclose(heatmap.bias, [0.25, -1.5], atol=tolerance)


@pytest.mark.parametrize(
    ("size", "squares", "stride"),
    [((2048, 2048), (64, 64), 32), ((2047, 1025), (64, 33), 32), ((100, 90), (13, 12), 8), ((96, 96), (2, 2), 64)],
)
def test_stride_of_a_network(size: tuple[int, int], squares: tuple[int, int], stride: int) -> None:
    assert network_stride(size, squares, 64) == stride


def test_stride_that_divides_nothing_is_none() -> None:
    assert network_stride((96, 96), (32, 32), 64) is None


def test_view_without_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="no piece"):
        put(random_squares(1, 2, 2), View((64, 64), (), 0.0, 0, ("no_tissue",)), (100, 100))


def test_pyramid_is_the_mean_of_what_was_seen() -> None:
    values = np.array([[[1.0, 3.0, 5.0], [np.nan, np.nan, np.nan], [np.nan, np.nan, 7.0]]], dtype=np.float32)
    half = pyramid(values)[1]
    np.testing.assert_array_equal(half, np.array([[[2.0, 5.0], [np.nan, 7.0]]], dtype=np.float32))
    assert [level.shape for level in pyramid(np.zeros((1, 1000, 300), np.float32))] == [
        (1, 1000, 300),
        (1, 500, 150),
        (1, 250, 75),
    ]


def test_average_of_an_ensemble_keeps_the_sums_also_with_other_strides() -> None:
    view = view_of((128, 128), ((64, 164, 0, 128), (0, 0)))
    coarse, fine = put(random_squares(2, 4, 4), view, (164, 170)), put(random_squares(2, 8, 8), view, (164, 170))
    mean = average([coarse, fine])
    assert mean.square_px == 16
    assert mean.values.shape == (2, 11, 11)
    total = np.nansum(mean.values.astype(np.float64), axis=(1, 2)) + mean.bias
    np.testing.assert_allclose(total, mean.logits, atol=1e-4)
    np.testing.assert_allclose(mean.logits, np.mean([coarse.logits, fine.logits], axis=0))


def test_file_is_a_pyramidal_ome_tiff_in_register(tmp_path: Path) -> None:
    view = view_of((512, 512), ((0, 512, 64, 576), (0, 0)))
    heatmap = put(random_squares(2, 512, 512), view, (700, 800))
    write_heatmap(tmp_path / "heatmap.tiff", heatmap, "slide <1>", {"checkpoint": "abc"})
    assert [path.name for path in tmp_path.iterdir()] == ["heatmap.tiff"]
    with tifffile.TiffFile(tmp_path / "heatmap.tiff") as file:
        assert file.is_ome
        assert file.is_bigtiff
        series = file.series[0]
        assert series.axes == "CYX"
        assert series.dtype == np.float32
        assert [level.shape for level in series.levels] == [(4, 700, 800), (4, 350, 400), (4, 175, 200)]
        assert len(file.pages) == 4
        assert len(file.pages.first.pages) == 2
        both = np.concatenate([heatmap.scores, heatmap.values])
        np.testing.assert_array_equal(series.asarray(), both)
        np.testing.assert_array_equal(series.levels[1].asarray(), pyramid(both)[1])
        tags = file.pages.first.tags
        assert "Predictor" not in tags, "Bio-Formats refuses the predictor of floating-point numbers"
        assert tags["ResolutionUnit"].value == 3 and tags["XResolution"].value == (20000, 1)
        xml = file.ome_metadata
    assert xml is not None
    space = {"o": "http://www.openmicroscopy.org/Schemas/OME/2016-06"}
    tree = ElementTree.fromstring(xml)
    pixels = tree.find(".//o:Pixels", space)
    assert pixels is not None
    assert float(pixels.attrib["PhysicalSizeY"]) == 1.0
    assert float(pixels.attrib["PhysicalSizeX"]) == 0.5
    assert pixels.attrib["PhysicalSizeXUnit"] == "µm"
    assert [channel.attrib["Name"] for channel in pixels.findall("o:Channel", space)] == [
        *(f"score {name}" for name in CLASSES),
        *(f"contribution {name}" for name in CLASSES),
    ]
    facts = {item.attrib["K"]: item.text for item in tree.findall(".//o:M", space)}
    total = np.nansum(heatmap.values.astype(np.float64), axis=(1, 2)) + json.loads(facts["bias"] or "")
    np.testing.assert_allclose(total, json.loads(facts["logits"] or ""), rtol=1e-4, atol=1e-2)
    assert facts["checkpoint"] == "abc"


def test_scores_lie_where_their_squares_lie_and_members_are_averaged() -> None:
    view = view_of((128, 192), ((64, 128, 64, 192), (0, 0)), ((192, 256, 0, 64), (64, 128)))
    squares = random_squares(2, 4, 6)
    heatmap = put(squares, view, (300, 250))
    canvas = np.full((2, 10, 8), np.nan)
    canvas[:, 2:4, 2:6] = scores_of(squares)[:, :2, :4]
    canvas[:, 6:8, 0:2] = scores_of(squares)[:, 2:, 4:]
    np.testing.assert_allclose(heatmap.scores, smoothed(canvas), rtol=1e-6)
    fine = put(random_squares(2, 8, 12), view, (300, 250))
    mean = average([heatmap, fine])
    repeated = heatmap.scores.repeat(2, 1).repeat(2, 2)[:, : fine.scores.shape[1], : fine.scores.shape[2]]
    np.testing.assert_allclose(mean.scores, (repeated + fine.scores) / 2, rtol=1e-5)


def test_smoothing_keeps_what_classes_sum_to_and_what_was_not_seen() -> None:
    first = np.random.default_rng(3).random((20, 30))
    first[5:12, 8:20] = np.nan
    smooth = smoothed(np.stack([first, 1 - first]))
    np.testing.assert_array_equal(np.isnan(smooth[0]), np.isnan(first))
    np.testing.assert_allclose(smooth.sum(0)[~np.isnan(first)], 1.0, atol=1e-6)
    np.testing.assert_allclose(smoothed(np.where(np.isnan(first), np.nan, 0.3)[None])[0, 0], 0.3, atol=1e-6)
    assert np.nanstd(smooth[0]) < 0.5 * np.nanstd(first)


def test_the_score_picture_opens_as_a_slide_at_all_levels(tmp_path: Path) -> None:
    import openslide

    view = view_of((512, 512), ((0, 512, 64, 576), (0, 0)))
    heatmap = put(random_squares(2, 512, 512), view, (700, 800))
    sure = np.where(np.isnan(heatmap.scores), np.nan, np.array([0.0, 1.0])[:, None, None]).astype(np.float32)
    write_score_picture(tmp_path / "scores.tiff", replace(heatmap, scores=sure))
    with openslide.OpenSlide(tmp_path / "scores.tiff") as slide:
        assert slide.level_dimensions == ((800, 700), (400, 350), (200, 175))
        assert float(slide.properties["tiff.XResolution"]) == 20000
        for level in range(3):
            place_px = (64 + 200, 200)
            pixel = slide.read_region(place_px, level, (1, 1)).getpixel((0, 0))
            assert pixel[:3] == class_color(1)
            assert slide.read_region((700, 600), level, (1, 1)).getpixel((0, 0))[:3] == (255, 255, 255)
    # Both of two labels: their mean, not a sum that is brighter than either.
    both = replace(heatmap, scores=np.where(np.isnan(heatmap.scores), np.nan, 1.0).astype(np.float32), exclusive=False)
    write_score_picture(tmp_path / "scores.tiff", both)
    with openslide.OpenSlide(tmp_path / "scores.tiff") as slide:
        pixel = slide.read_region((264, 200), 0, (1, 1)).getpixel((0, 0))
        np.testing.assert_allclose(pixel[:3], np.mean([class_color(0), class_color(1)], axis=0), atol=1)
