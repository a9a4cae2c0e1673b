"""What a scanner leaves exactly black is no ink and no tissue."""

from __future__ import annotations

import numpy as np
import pytest

from pathology.tissue.tissue import TissueParameters, find_tissue
from tests.pathology.tissue.test_pen import drawn, overview


@pytest.mark.parametrize("where", ["frame", "gap"])
def test_black_ground_changes_neither_tissue_nor_pen_nor_stains(where: str) -> None:
    plain = overview(drawn("he"))
    if where == "frame":
        image = np.zeros((3, plain.shape[1] + 60, plain.shape[2] + 80), np.uint8)
        inside = (slice(30, -30), slice(40, -40))
        image[(slice(None), *inside)] = plain
    else:
        image, inside = plain.copy(), (slice(None), slice(None))
        image[:, 4:20, 4:60] = 0
    free = np.ones(plain.shape[1:], bool)
    if where == "gap":
        free[2:22, 2:62] = False
    expected, found = find_tissue(plain, 8.0), find_tissue(image, 8.0)
    assert not found.pen.any()
    agree = found.tissue[inside][free] == expected.tissue[free]
    assert agree.mean() > 0.995
    assert not found.tissue[~image.any(0)].any()


def test_black_ink_is_ink() -> None:
    marked = find_tissue(overview(drawn("he", "black")), 8.0, TissueParameters(pen="mask"))
    assert marked.pen.any()


def test_no_black_leaves_the_image_as_it_is() -> None:
    image = overview(drawn("he"))
    before = image.copy()
    find_tissue(image, 8.0)
    assert np.array_equal(image, before)
