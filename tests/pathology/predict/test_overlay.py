from __future__ import annotations

import numpy as np
import pytest

from pathology.predict.colors import heat_ramp
from pathology.predict.heatmap import Heatmap
from pathology.predict.legend import bar_length_um
from pathology.predict.overlay import Overlay, draw_overlay, resampled_heat
from pathology.predict.regions import find_regions


def overlay_of(height_px: int = 640, width_px: int = 960) -> Overlay:
    """A slide of pink tissue in the middle; the cell (10, 20) speaks for the class, the right third was not seen."""
    thumbnail = np.full((height_px // 2, width_px // 2, 3), 250, np.uint8)
    thumbnail[60:-60, 80:-80] = (214, 160, 190)
    values = np.full((2, -(-height_px // 32), -(-width_px // 32)), np.nan, np.float32)
    values[:, :, :20] = 0.0
    values[1, 10, 12] = 1.0
    values[0, 5, 5] = 1.0
    heatmap = Heatmap(values, 32, (1.0, 1.0), (height_px, width_px), ("a", "b"), (0, 1), (0, 0), (0, 0), True)
    tissue = np.zeros((height_px // 8, width_px // 8), bool)
    tissue[15:-15, 20:-20] = True
    return Overlay(thumbnail, heatmap, 1, tissue, (8.0, 8.0), find_regions(heatmap, 1))


def test_heat_lies_where_the_cell_lies_and_only_for_the_class() -> None:
    heat, strongest = resampled_heat(overlay_of())
    assert strongest == 1.0
    y, x = np.unravel_index(heat.argmax(), heat.shape)
    assert 160 <= y < 176
    assert 192 <= x < 208
    assert heat[5 * 16 + 8, 5 * 16 + 8] == 0


def test_picture_changes_where_something_speaks_and_not_on_glass() -> None:
    overlay = overlay_of()
    image = np.asarray(draw_overlay(overlay))
    assert image.shape[1] == overlay.thumbnail.shape[1]
    assert image.shape[0] > overlay.thumbnail.shape[0]  # the legend
    peak = image[168, 200].astype(int)
    assert np.abs(peak - heat_ramp()[-1].astype(int)).max() < 60
    np.testing.assert_array_equal(image[20, 20], overlay.thumbnail[20, 20])
    seen, unseen = image[100, 200].astype(int), image[90:110, 350:370].reshape(-1, 3).mean(axis=0)
    assert unseen.sum() > seen.sum() + 20  # tissue that was not looked at is veiled


def test_nothing_positive_still_gives_a_picture() -> None:
    overlay = overlay_of()
    quiet = Heatmap(
        np.minimum(overlay.heatmap.values, 0),
        32,
        (1.0, 1.0),
        overlay.heatmap.slide_size_px,
        ("a", "b"),
        (0, 0),
        (0, 0),
        (0, 0),
        True,
    )
    image = draw_overlay(Overlay(overlay.thumbnail, quiet, 1, overlay.tissue, (8.0, 8.0), []))
    assert image.width == overlay.thumbnail.shape[1]


@pytest.mark.parametrize("size", [(200, 2000), (2000, 200), (64, 64)])
def test_legend_fits_any_shape(size: tuple[int, int]) -> None:
    overlay = overlay_of()
    thumbnail = np.full((*size, 3), 240, np.uint8)
    image = draw_overlay(Overlay(thumbnail, overlay.heatmap, 1, overlay.tissue, (8.0, 8.0), overlay.regions))
    assert image.width == size[1]


def test_ramp_darkens_evenly() -> None:
    lightness = heat_ramp().astype(float) @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) <= 0.75).all()
    assert lightness[0] - lightness[-1] > 150


def test_scale_bar_is_a_round_number() -> None:
    assert bar_length_um(1.0, 240) == 200
    assert bar_length_um(3.9, 240) == 500
    assert bar_length_um(0.25, 100) == 20
