"""Connected components are those of scikit-image, numbered alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from skimage import measure

from data.components import Runs, label

skimage: Any = measure


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (37, 53), (200, 300)])
@pytest.mark.parametrize("filled", [0.0, 0.3, 0.6, 1.0])
def test_labels_and_hulls(shape: tuple[int, int], filled: float, corners: bool) -> None:
    mask = np.random.default_rng(3).random(shape) < filled
    expected = skimage.label(mask, connectivity=2 if corners else 1)
    assert np.array_equal(label(mask, corners), expected)
    runs = Runs.from_mask(mask)
    hulls = [(box.y0, box.x0, box.y1, box.x1) for box in runs.bounding_boxes(runs.components(corners))]
    assert hulls == [region.bbox for region in skimage.regionprops(expected)]
