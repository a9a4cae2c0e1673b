"""What is lowered without a rule of its own: operators on values that every rank holds whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import assert_equal_to_one_process


class Attention(nn.Module):
    """Attention over a small map as Swin has it: its result lies otherwise in memory than the capture foresees."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.table = nn.Parameter(torch.randn(5, 2))
        self.register_buffer("places", torch.randint(0, 5, (16 * 16,)))
        self.fc = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x).flatten(2).transpose(1, 2)
        q, k, v = (layer(y).view(len(y), 16, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        bias = self.table[self.places].view(16, 16, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        seen = seen.reshape(len(y), -1, 16, 4).transpose(1, 2).contiguous()
        return self.fc(seen.reshape(len(y), 16, -1).mean(1))


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 2)])
def test_views_of_values_with_other_strides_than_captured(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(Attention(), (2, 3, 16, 16), grid)
