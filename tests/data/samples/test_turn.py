from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.turn import turned


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(1, 300), st.integers(1, 300), st.booleans(), st.integers(0, 7), st.booleans())
def test_turns_are_those_of_numpy(channels: int, height: int, width: int, mirror: bool, turns: int, part: bool) -> None:
    """Sizes beside and between multiples of a block, and views whose rows do not begin at whole words."""
    image = np.random.default_rng(height * width).integers(0, 256, (channels, height + 3, width + 5), dtype=np.uint8)
    pixels = image[:, 2 : height + 2, 3 : width + 3] if part else image[:, :height, :width].copy()
    before = pixels.copy()
    found = turned(pixels, mirror, turns)
    assert np.array_equal(found, np.rot90(before[:, :, ::-1] if mirror else before, turns, axes=(1, 2)))
    assert found.flags.c_contiguous and not np.shares_memory(found, image) and np.array_equal(pixels, before)


@pytest.mark.parametrize("turns", [1, 3])
def test_blocks_of_many_rows_are_turned_in_several_steps(turns: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, 515, 1030), dtype=np.uint8)
    assert np.array_equal(turned(pixels, True, turns), np.rot90(pixels[:, :, ::-1], turns, axes=(1, 2)))
