from __future__ import annotations

import numpy as np
import pytest

from pathology.readers.halving import mean_of_2x2
from pathology.readers.resample import halve


def plain(block: np.ndarray) -> np.ndarray:
    wide = block.astype(np.int64)
    total = wide[:, 0::2, 0::2] + wide[:, 1::2, 0::2] + wide[:, 0::2, 1::2] + wide[:, 1::2, 1::2]
    return ((total + 2) // 4).astype(np.uint8)


@pytest.mark.parametrize("shape", [(3, 2, 2), (3, 64, 64), (1, 30, 510), (3, 66, 1000), (2, 0, 4)])
def test_it_is_the_mean_of_four_pixels_half_rounded_up(shape: tuple[int, int, int]) -> None:
    block = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(mean_of_2x2(block), plain(block))


def test_the_largest_sums_and_every_remainder_are_exact() -> None:
    block = np.array([[[255, 255, 255, 255, 0, 1, 1, 1], [255, 254, 255, 253, 0, 0, 1, 0]]], np.uint8)
    assert mean_of_2x2(block).tolist() == [[[255, 255, 0, 1]]]
    assert np.array_equal(mean_of_2x2(block), plain(block))


def test_any_strides_are_taken() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (70, 80, 3), dtype=np.uint8)
    block = pixels.transpose(2, 0, 1)
    assert np.array_equal(mean_of_2x2(block), plain(block))
    assert np.array_equal(halve(block[:, 1:, :-2]), halve(block[:, 1:, :-2].copy()))
