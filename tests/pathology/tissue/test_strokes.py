"""A thin stroke is found as a whole, whatever pixels of it miss the colour of ink."""

from __future__ import annotations

import numpy as np
import pytest

from pathology.tissue.strokes import thin_strokes

GLASS = np.full(3, 245, np.float32)
SIDE, ROW, MPP_UM = 64, 30, 8.0


def stroke(missing: slice) -> tuple[np.ndarray, np.ndarray]:
    """Return a slide with a stroke of 24 × 200 µm, and its pixels of the colour of ink without those missing."""
    ink = np.zeros((SIDE, SIDE), bool)
    ink[ROW : ROW + 3, 20:45] = True
    image = np.ascontiguousarray(np.broadcast_to(np.where(ink, 90, 245).astype(np.uint8), (3, SIDE, SIDE)))
    dark = ink.copy()
    dark[:, missing] = False
    return image, dark


@pytest.mark.parametrize("missing", [slice(0), slice(32, 33), slice(31, 34)])
def test_a_gap_does_not_make_a_stroke_too_short(missing: slice) -> None:
    image, dark = stroke(missing)
    found = thin_strokes(image, GLASS, dark, MPP_UM)
    assert np.array_equal(found, dark)


def test_a_short_mark_is_no_stroke_and_one_far_away_does_not_lengthen_it() -> None:
    image, dark = stroke(slice(28, 36))
    assert not thin_strokes(image, GLASS, dark, MPP_UM).any()
