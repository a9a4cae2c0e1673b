"""Normalisation in either memory format gives the bits of the plain formula."""

from __future__ import annotations

import pytest
import torch

from data.loading.normalise import Normalisation


@pytest.mark.parametrize("size", [(7, 5), (1, 9), (9, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last])
def test_bands_and_rows_give_the_plain_formula(
    size: tuple[int, int], dtype: torch.dtype, order: torch.memory_format, given: torch.memory_format
) -> None:
    pixels = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8).contiguous(memory_format=given)
    before = pixels.clone()
    norm = Normalisation()
    scale = torch.tensor([1 / (255 * std) for std in norm.std], dtype=dtype).view(3, 1, 1)
    shift = torch.tensor([-mean / std for mean, std in zip(norm.mean, norm.std, strict=True)], dtype=dtype).view(
        3, 1, 1
    )
    found = norm(pixels, dtype, order)
    assert torch.equal(found, pixels.to(dtype) * scale + shift)
    assert found.dtype == dtype and found.is_contiguous(memory_format=order)
    assert torch.equal(pixels, before)
