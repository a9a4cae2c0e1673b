"""Places of maxima kept in a byte are those that PyTorch says."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.ops.window_places import WindowPlaces


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "size"),
    [
        ((3, 3), (2, 2), (1, 1), (1, 1), (9, 11)),
        ((2, 3), (1, 2), (1, 1), (2, 1), (8, 7)),
        ((3, 3), (3, 3), (0, 1), (1, 2), (10, 9)),
        ((3, 2), (1, 1), (1, 1), (1, 1), (1, 5)),
        ((16, 16), (8, 8), (0, 8), (1, 1), (33, 40)),
        ((1, 256), (1, 2), (0, 3), (1, 1), (2, 300)),
        ((256, 1), (2, 1), (3, 0), (1, 1), (300, 2)),
    ],
)
def test_numbers_in_windows_are_flat_indices_again(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    size: tuple[int, int],
) -> None:
    images = torch.randn(2, 3, *size)
    _, indices = torch.ops.aten.max_pool2d_with_indices(images, kernel, stride, padding, dilation, False)
    places = WindowPlaces(size[1], kernel, stride, padding, dilation)
    narrow = places.narrow(indices)
    assert places.fits and narrow.dtype == torch.uint8
    assert torch.equal(places.wide(narrow), indices)


def test_what_a_byte_cannot_tell_is_known() -> None:
    assert not WindowPlaces(40, (17, 16), (1, 1), (0, 0), (1, 1)).fits
    assert not WindowPlaces(3, (3, 3), (1, 1), (2, 2), (1, 2)).fits
