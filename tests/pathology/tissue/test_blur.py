"""Which patches are judged: by counting the mask's pixels in each, for slides and masks of any sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathology.tissue.blur import PATCH_PX, BlurMap


def shares(mask: np.ndarray, height_px: int, width_px: int) -> np.ndarray:
    """Return the fraction of each patch that a mask of the whole slide covers."""
    rows, columns = -(-height_px // PATCH_PX), -(-width_px // PATCH_PX)
    result = np.zeros((rows, columns))
    for r, c in np.ndindex(rows, columns):
        y0, y1 = (min(round(k * PATCH_PX * mask.shape[0] / height_px), mask.shape[0]) for k in (r, r + 1))
        x0, x1 = (min(round(k * PATCH_PX * mask.shape[1] / width_px), mask.shape[1]) for k in (c, c + 1))
        inside = mask[y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)]
        result[r, c] = inside.mean() if inside.size else 0
    return result


@settings(deadline=None, max_examples=60)
@given(
    st.integers(130, 900),
    st.integers(130, 900),
    st.sampled_from([1, 4, 8, 0.25]),
    st.sampled_from([0.3, 0.5, 0.7]),
    st.integers(0, 9),
)
def test_patches_are_measured_where_half_of_them_is_tissue_without_ink(
    height_px: int, width_px: int, mpp: float, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (max(8, int(height_px / mpp)), max(8, int(width_px / mpp)))
    tissue = np.kron(rng.random((4, 4)) < share, np.ones((-(-shape[0] // 4), -(-shape[1] // 4)), bool))
    tissue = tissue.astype(bool)[: shape[0], : shape[1]]
    pen = np.zeros(shape, bool)
    pen[: shape[0] // 9, shape[1] // 3 :] = True
    blur = BlurMap(height_px, width_px)
    blur.values[:] = 1.0
    blur.restrict_to(tissue, pen)
    on_tissue, inked = shares(tissue, height_px, width_px), shares(pen, height_px, width_px)
    clear = (np.abs(on_tissue - 0.5) > 1e-6) & (np.abs(inked - 0.02) > 1e-6)
    assert np.array_equal(np.isfinite(blur.values)[clear], ((on_tissue > 0.5) & (inked < 0.02))[clear])


def test_a_patch_of_which_exactly_half_is_tissue_is_measured() -> None:
    tissue = np.zeros((2 * PATCH_PX, PATCH_PX), bool)
    tissue[PATCH_PX // 2 : PATCH_PX] = True
    tissue[PATCH_PX : 2 * PATCH_PX, 1 : PATCH_PX // 2] = True
    blur = BlurMap(2 * PATCH_PX, PATCH_PX)
    blur.values[:] = 1.0
    blur.restrict_to(tissue, np.zeros_like(tissue))
    assert np.isfinite(blur.values[:, 0]).tolist() == [True, False]


@pytest.mark.parametrize("axis", [0, 1])
def test_patches_of_one_row_or_column_of_a_mask_are_measured_by_its_pixels(axis: int) -> None:
    share = np.random.default_rng(4).choice([0.0, 0.25, 0.75, 1.0], (4, 5))
    mask = (np.arange(4) / 4 < share[:, :, None]).reshape(4, 20)  # four pixels of each patch, side by side
    blur = BlurMap(PATCH_PX * 4, PATCH_PX * 5) if axis else BlurMap(PATCH_PX * 5, PATCH_PX * 4)
    blur.values[:] = 1.0
    tissue, measured = (mask, share > 0.5) if axis else (mask.T, share.T > 0.5)
    blur.restrict_to(np.ascontiguousarray(tissue), np.zeros_like(tissue))
    assert np.array_equal(np.isfinite(blur.values), measured) and 0 < measured.sum() < measured.size


def test_glass_pale_patches_and_narrow_ends_are_not_measured() -> None:
    rng = np.random.default_rng(0)
    textured = rng.integers(100, 200, (PATCH_PX, PATCH_PX)).astype(np.uint8)
    glass = rng.integers(216, 240, (PATCH_PX, PATCH_PX)).astype(np.uint8)
    even = np.full((PATCH_PX, PATCH_PX), 150, np.uint8)
    speck = np.full((PATCH_PX, PATCH_PX), 240, np.uint8)
    speck[8:24, 8:24] = 120  # its mean is above that of tissue, although its darkest pixel is dark
    row = np.concatenate([textured, glass, even, speck, textured[:, :63]], axis=1)
    blur = BlurMap(PATCH_PX, row.shape[1])
    blur.add(0, 0, np.stack([row] * 3))
    assert np.isfinite(blur.values).tolist() == [[True, False, False, False, False]]
    half = BlurMap(PATCH_PX // 2, PATCH_PX)
    half.add(0, 0, np.stack([textured[: PATCH_PX // 2]] * 3))
    assert np.isfinite(half.values).all(), "half a patch is enough"


def test_blocks_are_put_where_they_start() -> None:
    image = np.random.default_rng(1).integers(60, 200, (3, 300, 420), dtype=np.uint8)
    whole, parts = BlurMap(300, 420), BlurMap(300, 420)
    whole.add(0, 0, image)
    for y, x in ((0, 0), (0, 256), (128, 0), (128, 256)):
        parts.add(y, x, image[:, y : y + (128 if y == 0 else 256), x : x + 256])
    assert np.array_equal(whole.values, parts.values, equal_nan=True) and np.isfinite(whole.values).sum() == 6
