"""The sizes that are proposed: by trying all of them, on slides whose tissue is known by its height and width."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.coverage import STEPS, Coverage, check_coverage, coverage_of
from data.samples.view import View
from hyfi_core.errors import RequestError

Size = tuple[int, int]


class Rectangles:
    """Slides whose tissue is one rectangle of (height, width), of which an image shows what fits into it."""

    def __init__(self, size_px: Size, align_px: int, tissue: list[Size], gaps: tuple[int, ...] = ()) -> None:
        self.size_px, self.align_px, self._tissue, self._gaps = size_px, align_px, tissue, gaps

    def __len__(self) -> int:
        return len(self._tissue)

    def coverage_at(self, index: int, size_px: Size, factor: float = 1.0) -> float:
        if size_px[0] in self._gaps:  # packing is not monotone
            return 0.0
        height, width = self._tissue[index]
        shown = min(height / factor, size_px[0]) * min(width / factor, size_px[1])
        return shown * factor**2 / (height * width) if height else 0.0

    def view(self, index: int) -> View:
        share, (height, width) = self.coverage_at(index, self.size_px), self._tissue[index]
        flags = ("no_tissue",) if not height else ("cropped",) if share < 1 else ()
        return View(self.size_px, (), share, height * width, flags)

    def coverage(self, index: int) -> Coverage:
        def holds_all(size_px: Size, factor: float) -> bool:
            return self.coverage_at(index, size_px, factor) >= 1 - 1e-9

        return coverage_of(f"s{index}", f"c{index}", self.view(index), 0.5, self.align_px, holds_all)


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda blocks: (16 * blocks[0], 16 * blocks[1]))
TISSUE = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=4)


def smallest(fits: list[bool]) -> int:
    return fits.index(True)


@settings(deadline=None, max_examples=80)
@given(SIZES, TISSUE)
def test_proposals_for_a_slide_are_the_smallest_steps_that_hold_all(size_px: Size, tissue: list[Size]) -> None:
    slides = Rectangles(size_px, 16, tissue)
    for k, (height, width) in enumerate(tissue):
        coverage = slides.coverage(k)
        if height <= size_px[0] and width <= size_px[1]:
            assert (coverage.share, coverage.fits_size_px, coverage.fits_mpp) == (1.0, None, None)
            continue
        steps = [[-(-side * (STEPS + n) // (16 * STEPS)) * 16 for side in size_px] for n in range(3000)]
        n = smallest([height <= h and width <= w for h, w in steps])
        assert coverage.fits_size_px == tuple(steps[n])
        factor = 1 + smallest([height <= size_px[0] * (1 + n / STEPS) and width <= size_px[1] * (1 + n / STEPS)
                               for n in range(3000)]) / STEPS  # fmt: skip
        assert coverage.fits_mpp == pytest.approx(0.5 * factor, rel=1e-5)


@settings(deadline=None, max_examples=80)
@given(SIZES, TISSUE, st.sampled_from([0.5, 0.9, 1.0]), st.integers(0, 20))
def test_one_size_and_one_mpp_are_proposed_for_all_slides(
    size_px: Size, tissue: list[Size], least: float, gap: int
) -> None:
    slides = Rectangles(size_px, 16, [*tissue, (0, 0)], gaps=(16 * gap,) if gap and 16 * gap != size_px[0] else ())
    low = [k for k in range(len(tissue)) if slides.coverage_at(k, size_px) < least]
    with pytest.raises(RequestError) as caught:
        check_coverage(slides, least)
    message = str(caught.value)
    assert set(re.findall(r"^  (s\d+): ", message, re.MULTILINE)) == {f"s{k}" for k in [*low, len(tissue)]}
    assert ("this slide shows" in message) == (not low) and ("data.mpp" in message) == bool(low)
    if not low:
        return
    (shape, all_of_it) = [(int(h), int(w)) for h, w in re.findall(r"size_px=\[(\d+),(\d+)\]", message)]
    (mpp,) = map(float, re.findall(r"data\.mpp=([\d.]+) ", message))
    enough = {size: all(slides.coverage_at(k, size) >= least for k in low) for size in of_shape(size_px, 400)}
    assert enough[shape]
    if not slides._gaps:
        assert shape == next(size for size, is_enough in enough.items() if is_enough)
    own = [slides.coverage(k) for k in low]
    assert all_of_it == tuple(max(c.fits_size_px[axis] for c in own if c.fits_size_px) for axis in (0, 1))
    assert mpp == pytest.approx(max(c.fits_mpp or 0 for c in own), rel=1e-5)


def of_shape(size_px: Size, count: int) -> list[Size]:
    """Sizes of the same shape, a block larger on the short side each time, rounded up to blocks."""
    short = min(size_px)
    return [
        (-(-size_px[0] * (short + 16 * k) // short // 16) * 16, -(-size_px[1] * (short + 16 * k) // short // 16) * 16)
        for k in range(1, count)
    ]
