"""Cuts hold the pixels of their box: views within the map, padded outside, empty with the right sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.ops.cut import cut
from hyfi_core.plan.box import Box

MAP = Box(0, 6, 0, 8)
VALUES = torch.arange(2 * 3 * 6 * 8.0).view(2, 3, 6, 8)


FAR = [Box(-3, -1, 2, 7), Box(1, 4, -2, 0), Box(6, 8, 8, 9), Box(-4, -2, -4, -1)]  # of padding alone


@pytest.mark.parametrize("need", [Box(1, 4, 2, 7), Box(-2, 3, 5, 11), Box(0, 6, -1, 9), *FAR])
def test_a_cut_is_the_box_of_the_padded_map(need: Box) -> None:
    padded = F.pad(VALUES, (4, 4, 4, 4), value=-1.0)
    expected = padded[:, :, need.y0 + 4 : need.y1 + 4, need.x0 + 4 : need.x1 + 4]
    assert cut(MAP, need, MAP, (2, 3), -1.0)(VALUES).equal(expected)
    turned = cut(MAP, need, MAP, (3, 2), -1.0)(VALUES.transpose(2, 3))
    assert turned.equal(expected.transpose(2, 3))


def test_a_cut_within_the_map_is_a_view() -> None:
    part = cut(Box(2, 6, 0, 8), Box(3, 5, 1, 4), MAP, (2, 3), 0.0)(VALUES[:, :, 2:])
    assert part.equal(VALUES[:, :, 3:5, 1:4])
    assert part.untyped_storage().data_ptr() == VALUES.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("need", "sides"), [(Box(2, 2, 0, 5), (0, 5)), (Box(1, 4, 3, 3), (3, 0)), (Box(9, 9, 9, 9), (0, 0))]
)
def test_an_empty_cut_has_the_sizes_of_its_box(need: Box, sides: tuple[int, int]) -> None:
    assert cut(MAP, need, MAP, (2, 3), 0.0)(VALUES).shape == (2, 3, *sides)
    assert cut(MAP, need, MAP, (3, 2), 0.0)(VALUES.transpose(2, 3)).shape == (2, 3, *sides[::-1])
