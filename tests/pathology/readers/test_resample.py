from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.store.layout import LevelSize
from hyfi_core.plan.box import Box
from pathology.ingest.pyramid import PyramidBuilder, fitted, level_sizes
from pathology.readers.resample import Taps, halve, make_taps, mean_of_2x2, resample, target_size


def area_means(source: np.ndarray, ratio: float, target: int) -> np.ndarray:
    """Return means over [i·ratio, (i + 1)·ratio) along the last axis, by the integral of the pixels."""
    size = source.shape[-1]
    integral = np.concatenate([np.zeros((*source.shape[:-1], 1)), source.astype(np.float64).cumsum(-1)], -1)
    edges = np.minimum(np.arange(target + 1) * ratio, size)
    below = np.minimum(edges.astype(int), size - 1)
    at = integral[..., below] + source[..., below] * (edges - below)
    return np.diff(at) / np.diff(edges)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.3, 9.0), st.integers(9, 60), st.integers(9, 60), st.integers(0, 2**32 - 1))
def test_each_pixel_is_the_mean_of_the_area_under_it(ratio: float, height: int, width: int, seed: int) -> None:
    source = np.random.default_rng(seed).integers(0, 256, (2, height, width), dtype=np.uint8)
    rows = make_taps(0, target_size(height, ratio), ratio, height)
    columns = make_taps(0, target_size(width, ratio), ratio, width)
    assert (rows.first, columns.first) == (0, 0)
    found = resample(source[:, : rows.end, : columns.end], rows, columns)
    wide = area_means(source, ratio, found.shape[2])
    expected = area_means(wide.transpose(0, 2, 1), ratio, found.shape[1]).transpose(0, 2, 1)
    assert np.abs(found - expected).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("factor", [2, 3, 4, 6, 16])
def test_whole_factors_skip_work_and_give_the_same(factor: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, (3, factor * 20, factor * 17), dtype=np.uint8)
    rows, columns = make_taps(0, 20, factor, factor * 20), make_taps(0, 17, factor, factor * 17)
    assert rows.whole == columns.whole == factor
    slow = [Taps(t.first, t.end, t.index, t.weight, 0) for t in (rows, columns)]
    assert np.array_equal(resample(source, rows, columns), resample(source, *slow))


@pytest.mark.parametrize("ratio", [2.0, 0.9889, 3.7, 1.0])
def test_parts_join_to_the_whole(ratio: float) -> None:
    source = np.random.default_rng(2).integers(0, 256, (3, 97, 40), dtype=np.uint8)
    height = target_size(97, ratio)
    columns = make_taps(0, 10, ratio, 40)
    across = slice(columns.first, columns.end)
    whole = resample(source[:, :, across], make_taps(0, height, ratio, 97), columns) if ratio != 2.0 else None
    cut = height // 3
    parts = []
    for start, stop in ((0, cut), (cut, height)):
        rows = make_taps(start, stop, ratio, 97)
        parts.append(resample(source[:, rows.first : rows.end, across], rows, columns))
    joined = np.concatenate(parts, 1)
    assert joined.shape[1] == height
    if whole is not None:
        assert np.array_equal(joined, whole[:, :height])


@pytest.mark.parametrize("ratio", [1.0, 2.0, 3.0])
def test_a_target_pixel_beyond_the_source_shows_its_last_pixel(ratio: float) -> None:
    size = int(ratio) * 7
    source = np.random.default_rng(2).integers(0, 256, (3, size, size), dtype=np.uint8)
    taps = make_taps(0, 8, ratio, size)
    found = resample(source, taps, taps)
    assert found.shape == (3, 8, 8)
    assert found[0, 7, 7] == source[0, -1, -1]
    assert np.array_equal(found[:, :7, :7], resample(source, *[make_taps(0, 7, ratio, size)] * 2))


def test_positions_do_not_drift_over_a_hundred_thousand_pixels() -> None:
    ratio = 1.0 / 0.2527
    taps = make_taps(99_000, 100_000, ratio, 10**7)
    centres = (taps.weight * (taps.first + taps.index + 0.5)).sum(0)
    assert np.abs(centres - (np.arange(99_000, 100_000) + 0.5) * ratio).max() < 0.05


@pytest.mark.parametrize("shape", [(4, 6), (5, 6), (4, 7), (5, 7), (1, 1), (1, 4)])
def test_halving_replicates_an_odd_edge_and_rounds_half_up(shape: tuple[int, int]) -> None:
    source = np.random.default_rng(3).integers(0, 256, (3, *shape), dtype=np.uint8)
    padded = np.pad(source, ((0, 0), (0, shape[0] % 2), (0, shape[1] % 2)), mode="edge").astype(int)
    expected = (padded[:, ::2, ::2] + padded[:, 1::2, ::2] + padded[:, ::2, 1::2] + padded[:, 1::2, 1::2] + 2) // 4
    assert np.array_equal(halve(source), expected)


@pytest.mark.parametrize("size", [(64, 64), (65, 33), (17, 200), (129, 127), (1, 40)])
def test_the_one_pass_pyramid_equals_halving_whole_levels(size: tuple[int, int]) -> None:
    image = np.random.default_rng(4).integers(0, 256, (3, *size), dtype=np.uint8)
    sizes = [LevelSize(*size)]
    while max(sizes[-1].height_px, sizes[-1].width_px) > 20:
        sizes.append(LevelSize(-(-sizes[-1].height_px // 2), -(-sizes[-1].width_px // 2)))
    levels = [np.zeros((3, s.height_px, s.width_px), np.uint8) for s in sizes]
    written: list[tuple[int, int, int]] = []

    def read(box: Box) -> np.ndarray:
        return image[(slice(None), *box.slices())]

    def write(level: int, y0: int, x0: int, block: np.ndarray) -> None:
        written.append((level, y0, x0))
        levels[level][:, y0 : y0 + block.shape[1], x0 : x0 + block.shape[2]] = block

    PyramidBuilder(sizes, read, write, shard_px=16).build()
    assert len(written) == len(set(written))
    expected = image
    for level in levels:
        assert np.array_equal(level, expected)
        expected = halve(expected)


def test_level_sizes_halve_upwards_until_small() -> None:
    sizes = level_sizes(4097, 1000, at_least=1)
    assert [(s.height_px, s.width_px) for s in sizes] == [(4097, 1000), (2049, 500), (1025, 250), (513, 125), (257, 63)]
    assert len(level_sizes(100, 100, at_least=4)) == 4


@pytest.mark.parametrize("size", [(7, 9), (8, 9), (7, 10), (6, 9), (8, 8)])
def test_an_overview_gets_the_size_of_its_level(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(6).integers(0, 255, (3, 7, 9), dtype=np.uint8)
    rows, columns = (np.minimum(np.arange(n), side - 1) for n, side in zip(size, (7, 9), strict=True))
    found = fitted(pixels, LevelSize(*size))
    assert found.flags["C_CONTIGUOUS"] and np.array_equal(found, pixels[:, rows][:, :, columns])


def mean_of_four(block: np.ndarray) -> np.ndarray:
    wide = block.astype(np.int64)
    total = wide[:, 0::2, 0::2] + wide[:, 1::2, 0::2] + wide[:, 0::2, 1::2] + wide[:, 1::2, 1::2]
    return ((total + 2) // 4).astype(np.uint8)


@pytest.mark.parametrize("shape", [(3, 2, 2), (3, 64, 64), (1, 30, 510), (3, 66, 1000), (2, 0, 4)])
def test_halving_takes_the_mean_of_four_pixels_half_rounded_up(shape: tuple[int, int, int]) -> None:
    block = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(mean_of_2x2(block), mean_of_four(block))


def test_the_largest_sums_and_every_remainder_are_exact() -> None:
    block = np.array([[[255, 255, 255, 255, 0, 1, 1, 1], [255, 254, 255, 253, 0, 0, 1, 0]]], np.uint8)
    assert mean_of_2x2(block).tolist() == [[[255, 255, 0, 1]]]
    assert np.array_equal(mean_of_2x2(block), mean_of_four(block))


def test_halving_takes_any_strides() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (70, 80, 3), dtype=np.uint8)
    block = pixels.transpose(2, 0, 1)
    assert np.array_equal(mean_of_2x2(block), mean_of_four(block))
    assert np.array_equal(halve(block[:, 1:, :-2]), halve(block[:, 1:, :-2].copy()))
