from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from pathology.predict import overlay as module
from pathology.predict.colors import class_color
from pathology.predict.heatmap import Heatmap
from pathology.predict.legend import STRIP_RGB, Key, LegendItem, bar_length_um
from pathology.predict.overlay import Overlay, draw_overlay, score_colors, tissue_squares
from pathology.predict.regions import RankedRegions, find_regions
from pathology.predict.results import wide_enough


def overlay_of(height_px: int = 640, width_px: int = 960) -> Overlay:
    """A slide of pink tissue in the middle; the square (10, 20) speaks for the class, the right third was not seen."""
    thumbnail = np.full((height_px // 2, width_px // 2, 3), 250, np.uint8)
    thumbnail[60:-60, 80:-80] = (214, 160, 190)
    values = np.full((2, -(-height_px // 32), -(-width_px // 32)), np.nan, np.float32)
    values[:, :, :20] = 0.0
    values[1, 10, 12] = 1.0
    values[0, 5, 5] = 1.0
    scores = np.where(np.isnan(values), np.nan, 0.5).astype(np.float32)
    scores[:, 8:12, 10:14] = np.array([0.0, 1.0])[:, None, None]
    scores[:, 4:7, 4:7] = np.array([1.0, 0.0])[:, None, None]
    heatmap = Heatmap(scores, values, 32, (1.0, 1.0), (height_px, width_px), ("a", "b"), (0, 1), (0, 0), (0, 0), True)
    tissue = np.zeros((height_px // 8, width_px // 8), bool)
    tissue[15:-15, 20:-20] = True
    return Overlay(thumbnail, heatmap, True, tissue, (8.0, 8.0), find_regions(heatmap, 1))


def test_colours_lie_where_the_classes_score() -> None:
    overlay = overlay_of()
    colors, certainty = score_colors(overlay.heatmap, overlay.thumbnail.shape)
    np.testing.assert_allclose(colors[10 * 16, 12 * 16], class_color(1), atol=1)
    np.testing.assert_allclose(colors[5 * 16 + 8, 5 * 16 + 8], class_color(0), atol=1)
    assert certainty[10 * 16, 12 * 16] > 0.99 and certainty[15 * 16, 5 * 16] == 0


def test_classes_that_do_not_exclude_each_other_mix_to_a_colour_of_the_legend_not_a_brighter_or_darker_one() -> None:
    overlay = overlay_of()
    unseen = np.isnan(overlay.heatmap.values)
    for high in ([0.9, 0.9], [0.5, 0.0], [0.0, 0.0]):
        scores = np.where(unseen, np.nan, np.array(high)[:, None, None]).astype(np.float32)
        heatmap = replace(overlay.heatmap, scores=scores, exclusive=False)
        colors, certainty = score_colors(heatmap, overlay.thumbnail.shape)
        total = sum(high)
        mean = sum(weight * np.array(class_color(index)) for index, weight in enumerate(high)) / (total or 1.0)
        np.testing.assert_allclose(colors[160, 160], mean, atol=1)
        np.testing.assert_allclose(certainty[160, 160], max(high), atol=1e-6)
        assert np.isfinite(colors).all() and colors.max() <= 255.5


def test_picture_changes_where_a_class_scores_and_not_on_glass() -> None:
    overlay = overlay_of()
    image = np.asarray(draw_overlay(overlay))
    assert image.shape[1] == overlay.thumbnail.shape[1]
    assert image.shape[0] > overlay.thumbnail.shape[0]  # the legend
    red, blue = image[165, 195].astype(int), image[90, 90].astype(int)
    assert red[0] > red[2] + 40 and blue[2] > blue[0] + 20
    np.testing.assert_array_equal(image[20, 20], overlay.thumbnail[20, 20])
    seen, unseen = image[220, 200].astype(int), image[90:110, 350:370].reshape(-1, 3).mean(axis=0)
    assert unseen.sum() > seen.sum() + 20  # tissue that was not seen is veiled


def test_no_class_is_shown_where_none_is_given() -> None:
    overlay = overlay_of()
    plain = np.asarray(draw_overlay(replace(overlay, shown=False, regions=RankedRegions())))
    undecided = replace(overlay.heatmap, scores=np.full_like(overlay.heatmap.scores, 0.5))
    quiet = np.asarray(draw_overlay(replace(overlay, heatmap=undecided, regions=RankedRegions())))
    height = overlay.thumbnail.shape[0]
    np.testing.assert_array_equal(plain[:height, :300], quiet[:height, :300])


def legend_of(monkeypatch: pytest.MonkeyPatch, overlay: Overlay) -> list[str]:
    """Return the texts of an overlay's legend."""
    legends: list[list[LegendItem]] = []
    monkeypatch.setattr(module, "add_legend", lambda image, items: (legends.append(items), image)[1])
    draw_overlay(overlay)
    return [item.text for item in legends[0] if isinstance(item, Key)]


def test_legend_has_what_is_drawn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = overlay_of()
    assert legend_of(monkeypatch, overlay) == ["a", "b", "tissue", "regions, ranked by score", "tissue not seen"]
    one = overlay.heatmap.scores.copy()
    one[:, 4:7, 4:7] = 0.5
    single = replace(overlay, heatmap=replace(overlay.heatmap, scores=one))
    assert legend_of(monkeypatch, single)[:2] == ["b", "tissue"]
    nothing = replace(overlay, shown=False, regions=RankedRegions(), tissue=np.zeros_like(overlay.tissue))
    assert legend_of(monkeypatch, nothing) == []


def test_outlines_of_a_weak_model_are_few_and_the_rest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = overlay_of(4096, 4096)
    scores = np.zeros((2, 128, 128), np.float32)
    scores[1] = np.where(np.random.default_rng(0).random((128, 128)) < 0.75, 0.55, 0.45)  # a sieve
    scores[0] = 1 - scores[1]
    heatmap = replace(overlay.heatmap, scores=scores, values=scores - 0.45)
    lines: list[object] = []
    monkeypatch.setattr(module.ImageDraw.ImageDraw, "line", lambda *arguments, **_: lines.append(arguments))
    texts = legend_of(monkeypatch, replace(overlay, heatmap=heatmap, regions=find_regions(heatmap, 1)))
    assert len(lines) == module.MOST_OUTLINES
    assert any(text.endswith("below 1 % of the evidence not outlined") for text in texts)
    assert any(text.endswith("holes in regions not outlined") for text in texts)


@pytest.mark.parametrize("size", [(200, 2000), (2000, 200), (64, 64)])
def test_legend_fits_any_shape(size: tuple[int, int]) -> None:
    overlay = overlay_of()
    thumbnail = np.full((*size, 3), 240, np.uint8)
    image = draw_overlay(Overlay(thumbnail, overlay.heatmap, True, overlay.tissue, (8.0, 8.0), overlay.regions))
    picture = np.asarray(image)
    assert image.width == size[1] if size[1] > 480 else image.width >= size[1]
    assert (picture[size[0] :, -1] == STRIP_RGB).all()  # no text is cut off at the right
    assert (picture[: size[0], size[1] :] == STRIP_RGB).all()


def test_a_small_picture_is_enlarged_until_its_legend_is_not_cut() -> None:
    overlay = overlay_of()
    thumbnail = wide_enough(np.full((185, 139, 3), 240, np.uint8))
    assert thumbnail.shape == (740, 556, 3) and (thumbnail == 240).all()
    image = draw_overlay(Overlay(thumbnail, overlay.heatmap, True, overlay.tissue, (8.0, 8.0), overlay.regions))
    assert (np.asarray(image)[741:, -1] == STRIP_RGB).all()


def test_a_large_or_a_long_picture_stays_as_it_is() -> None:
    for shape in ((300, 480, 3), (1900, 90, 3)):
        picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        np.testing.assert_array_equal(wide_enough(picture), picture)


def test_scale_bar_is_a_round_number() -> None:
    assert bar_length_um(1.0, 240) == 200
    assert bar_length_um(3.9, 240) == 500
    assert bar_length_um(0.25, 100) == 20


@pytest.mark.parametrize("pixel_um", [2.5, 5.0, 20.0])
def test_squares_with_tissue_have_no_holes_whatever_the_mask(pixel_um: float) -> None:
    values = np.zeros((1, 16, 16), np.float32)
    heatmap = Heatmap(values, values, 10, (0.5, 0.5), (160, 160), ("a",), (0.0,), (0.0,), (0.0,), True)
    side = round(80 / pixel_um)
    tissue = np.zeros((side, side), bool)
    tissue[: side // 2, : side // 4] = True
    expected = np.zeros((16, 16), bool)
    expected[:8, :4] = True
    np.testing.assert_array_equal(tissue_squares(tissue, (pixel_um, pixel_um), heatmap), expected)


def test_its_memory_does_not_grow_with_the_classes() -> None:
    """Bytes for each pixel of the picture, of which the result has three."""
    overlay, shape, classes = overlay_of(), (900, 900), 12
    scores = np.full((classes, *overlay.heatmap.scores.shape[1:]), 1 / classes, np.float32)
    heatmap = replace(
        overlay.heatmap,
        scores=scores,
        values=scores,
        class_names=tuple("abcdefghijkl"),
        **{name: (0.0,) * classes for name in ("logits", "bias", "shared")},
    )
    large = replace(overlay, heatmap=heatmap, thumbnail=np.full((*shape, 3), 200, np.uint8), regions=RankedRegions())
    draw_overlay(large)  # what libraries keep
    tracemalloc.start()
    draw_overlay(large)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 80 * shape[0] * shape[1]
