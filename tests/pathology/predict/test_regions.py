from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from pathology.predict.heatmap import Heatmap
from pathology.predict.regions import (
    MOST_CONTOURS,
    Level0,
    contour_features,
    find_regions,
    tissue_features,
    to_geojson,
    write_regions,
)
from pathology.tissue.outlines import outline


def heatmap_of(values: np.ndarray, square_px: int = 10, slide: tuple[int, int] | None = None) -> Heatmap:
    size = slide or (values.shape[0] * square_px, values.shape[1] * square_px)
    both = np.stack([-values, values]).astype(np.float32)
    scores = np.stack([1 - values, values]).clip(0, 1).astype(np.float32)
    return Heatmap(
        scores, both, square_px, (0.5, 0.5), size, ("benign", "malignant"), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0), True
    )


def area(ring: list[tuple[float, float]]) -> float:
    x, y = np.array(ring).T
    return float(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]) / 2)


def test_regions_are_ranked_by_score_and_glass_is_ignored() -> None:
    values = np.full((8, 9), np.nan)
    values[1:7, 1:8] = 0.1
    values[2, 2] = 1.0
    values[4:6, 5:7] = 0.75
    first, second = find_regions(heatmap_of(values), 1, least_um=1).listed
    assert (first.rank, first.score, first.peak) == (1, 1.0, (2, 2))
    assert (second.rank, second.score, len(second.squares[0])) == (2, 0.75, 4)
    assert second.share == pytest.approx(3 / (3 + 1 + 0.1 * 37))
    assert second.area_um2 == 4 * 25.0
    fewer = find_regions(heatmap_of(values), 1, most=1, least_um=1)
    assert (len(fewer.listed), fewer.beyond) == (1, 1)
    tissue = np.ones((8, 9), bool)
    tissue[2, 2] = False
    assert len(find_regions(heatmap_of(values), 1, tissue, least_um=1).listed) == 1


def test_of_equal_scores_the_larger_contribution_comes_first() -> None:
    values = np.zeros((8, 20))
    values[1, 1:3], values[1, 5:9], values[1, 12:15] = 0.7, 0.7, 0.7
    regions = find_regions(heatmap_of(values), 1, least_um=1).listed
    assert [len(region.squares[0]) for region in regions] == [4, 3, 2]


def test_regions_with_hardly_any_evidence_are_counted_only() -> None:
    values = np.zeros((40, 40))
    values[:20] = 0.6
    values[30, 5], values[30, 20] = 0.99, 4.9  # of 485.89: 0.2 % and 1.0085 %
    ranked = find_regions(heatmap_of(values), 1, least_um=1)
    assert ([region.peak for region in ranked.listed], ranked.faint) == ([(30, 20), (0, 0)], 1)
    whole = find_regions(heatmap_of(values), 1, least_um=1, fold=False)  # of a maximum over positions
    assert whole.faint == 0 and len(whole.listed) == len(ranked.listed) + ranked.faint


def test_where_no_square_contributes_no_region_is_faint() -> None:
    values = np.full((9, 9), -1.0)
    heatmap = heatmap_of(values)
    heatmap.scores[1, 2, 2] = heatmap.scores[1, 6, 6] = 0.9  # by the bias alone
    ranked = find_regions(heatmap, 1, least_um=1)
    assert [region.share for region in ranked.listed] == [None, None] and ranked.faint == 0


def test_a_large_region_is_listed_though_its_peak_lies_in_the_square_of_a_speck() -> None:
    values = np.zeros((40, 40))
    values[5, 20] = 5.0  # 1.2 % of the evidence
    values[7:, 10:30] = 0.6
    values[7, 20] = 0.65
    speck, large = find_regions(heatmap_of(values), 1, least_um=50).listed
    assert len(speck.squares[0]) == 100 and speck.area_um2 == 25.0
    assert len(large.squares[0]) == 33 * 20


def test_regions_are_as_large_as_one_sees() -> None:
    values = np.full((40, 40), 0.01)
    values[0, 20] = 0.4  # nowhere more than half: then around the highest score
    (region,) = find_regions(heatmap_of(values), 1, least_um=50).listed
    assert region.peak == (0, 20) and len(region.squares[0]) == 100
    assert region.squares[0].min() == 0 and region.squares[1].min() == 15
    assert region.score == pytest.approx(0.4)  # not 0.014, the mean of the square
    assert region.area_um2 == 25.0 and region.contribution == pytest.approx(0.4)


def test_squares_of_neighbours_are_one_region() -> None:
    values = np.full((40, 40), 0.01)
    values[20, 20], values[20, 23], values[20, 32] = 0.9, 0.8, 0.7
    regions = find_regions(heatmap_of(values), 1, least_um=50).listed
    assert [one.peak for one in regions] == [(20, 20), (20, 32)]
    assert [one.rank for one in regions] == [1, 2]


def test_tissue_is_outlined_in_the_coordinates_of_the_slide() -> None:
    heatmap = heatmap_of(np.zeros((8, 8)), square_px=10)  # 40 × 40 µm
    tissue = np.zeros((10, 10), bool)
    tissue[:8, :4] = True
    level0 = Level0(((2.0, 0.0, 0.0), (0.0, 2.0, 0.0)))
    (feature,) = tissue_features(tissue, (4.0, 4.0), heatmap, slide_id="s", level0=level0)
    corners = np.array(feature["geometry"]["coordinates"][0])
    assert corners.max(axis=0).tolist() == [64, 128] or corners.max(axis=0).tolist() == [128, 128]
    assert feature["properties"]["classification"]["name"] == "Tissue"


def test_density_contours_are_nested_and_lie_where_the_score_is() -> None:
    y, x = np.mgrid[:60, :80]
    score = np.exp(-((y - 30) ** 2 + (x - 50) ** 2) / (2 * 9.0**2))
    score[28:32, 10] = 1.0  # a spot far narrower than what density looks at
    score[:, 70:] = np.nan
    heatmap = heatmap_of(score, square_px=64)  # 32 µm
    level0 = Level0(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)))
    found = contour_features(heatmap, 1, np.ones((60, 80), bool), slide_id="s", level0=level0)
    assert [feature["properties"]["measurements"]["density"] for feature in found] == [0.25, 0.5, 0.75]
    extents = []
    for feature in found:
        (ring,) = feature["geometry"]["coordinates"]  # one area without a hole: the spot is not dense
        corners = np.array(ring) / 64
        assert ring[0] == ring[-1] and corners[:, 0].max() <= 70.5
        extents.append([*corners.min(axis=0), *corners.max(axis=0)])
    low, middle, high = np.array(extents)
    for outer, inner in ((low, middle), (middle, high)):
        assert (outer[:2] < inner[:2]).all() and (outer[2:] > inner[2:]).all()
    assert abs(middle[3] - middle[1] - 2 * 9.2 * np.sqrt(2 * np.log(2))) < 2  # σ of 9 and of 2 squares together
    assert (
        contour_features(heatmap_of(np.full((5, 5), 0.1)), 1, np.ones((5, 5), bool), slide_id="s", level0=level0) == []
    )


def test_a_density_with_a_hole_keeps_it() -> None:
    y, x = np.mgrid[:40, :40]
    ring = (np.abs(np.hypot(y - 20, x - 20) - 12) < 4).astype(float)
    level0 = Level0(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)))
    found = contour_features(heatmap_of(ring, square_px=200), 1, np.ones((40, 40), bool), slide_id="s", level0=level0)
    assert [len(feature["geometry"]["coordinates"]) for feature in found] == [2, 2, 2]


def test_of_many_contours_the_largest_are_written() -> None:
    values = np.zeros((60, 60))
    values[2::6, 2::6] = 1.0
    values[2:5, 2:5] = 1.0
    level0 = Level0(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)))
    found = contour_features(
        heatmap_of(values, square_px=1000), 1, np.ones((60, 60), bool), slide_id="s", level0=level0
    )
    assert len(found) == 3 * MOST_CONTOURS
    assert np.array(found[0]["geometry"]["coordinates"][0]).max() < 6000  # the largest first


def test_a_class_that_scores_nothing_has_no_region() -> None:
    assert find_regions(heatmap_of(np.full((3, 3), -1.0)), 1).listed == ()


def test_ring_with_a_hole() -> None:
    mask = np.ones((3, 3), bool)
    mask[1, 1] = False
    outer, hole = outline(np.nonzero(mask))
    assert area(outer) == 9
    assert area(hole) == -1
    assert len(outer) == len(hole) == 5
    assert outer[0] == outer[-1]


def test_hole_that_touches_the_outline_at_a_corner_is_a_ring_of_its_own() -> None:
    mask = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 0]], bool)
    outer, hole = outline(np.nonzero(mask))
    assert area(outer) == 8
    assert area(hole) == -1
    assert len(set(outer)) == len(outer) - 1


@settings(max_examples=80, deadline=None)
@given(hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, max_side=7)))
def test_rings_are_simple_and_enclose_exactly_the_squares(mask: np.ndarray) -> None:
    from skimage.measure import label

    groups = label(mask, connectivity=1)
    for group in range(1, groups.max() + 1):
        squares = np.nonzero(groups == group)
        rings = outline(squares)
        assert area(rings[0]) > 0
        assert all(area(ring) < 0 for ring in rings[1:])
        assert sum(map(area, rings)) == len(squares[0])
        assert all(len(set(ring)) == len(ring) - 1 for ring in rings)


def test_geojson_is_what_qupath_reads(tmp_path: Path) -> None:
    values = np.zeros((4, 5))
    values[1, 2] = 3.0
    values[3, 4] = 1.0
    heatmap = heatmap_of(values, square_px=10, slide=(35, 47))
    affine = Level0(((2.0, 0.0, 50.0), (0.0, 2.0, 100.0)), bounds_origin_px=(50.0, 80.0))
    regions = find_regions(heatmap, 1, least_um=1).listed
    collection = to_geojson(regions, heatmap, 1, slide_id="s 1", level0=affine)
    write_regions(tmp_path / "regions.geojson", collection)
    read = json.loads((tmp_path / "regions.geojson").read_text())
    assert read["type"] == "FeatureCollection"
    first, second = read["features"]
    ring = first["geometry"]["coordinates"][0]
    assert first["geometry"]["type"] == "Polygon"
    assert sorted(map(tuple, set(map(tuple, ring)))) == [(60, 20), (60, 40), (80, 20), (80, 40)]
    assert first["properties"]["objectType"] == "annotation"
    assert first["properties"]["classification"]["name"] == "malignant"
    assert len(first["properties"]["classification"]["color"]) == 3
    assert first["properties"]["measurements"]["contribution to the logit"] == 3.0
    # The last square hangs over the slide's border and is cut there.
    corners = np.array(second["geometry"]["coordinates"][0])
    assert corners.max(axis=0).tolist() == [2 * 47 + 100 - 80, 2 * 35 + 50 - 50]
    again = to_geojson(regions, heatmap, 1, slide_id="s 1", level0=affine)
    assert [f["id"] for f in again["features"]] == [f["id"] for f in read["features"]]
