"""Operations of a model, counted from its capture, against torch's counter around a real step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyfi_core.capture.export import capture
from hyfi_core.cost.model_flops import training_flops


def count(model: nn.Module, shape: tuple[int, int, int, int]) -> float:
    trained = {name for name, weights in model.named_parameters() if weights.requires_grad}
    return training_flops(capture(model, shape, torch.float32), trained)


class ManyProducts(nn.Module):
    """Convolutions, also transposed, a linear layer of every position, attention written out, an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.mix = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.project = nn.Linear(16, 48)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.patch(x))
        q, k, v = self.project(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return self.head(mixed.mean(1)) + self.up(x).mean() + torch.einsum("bik,bjk->bij", q, k).mean()


class PartlyFrozen(nn.Module):
    """Its first layer has no gradient at all, its second one only that of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3).requires_grad_(False)
        self.second = nn.Conv2d(4, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).mean((2, 3))


@pytest.mark.parametrize("made", [ManyProducts, PartlyFrozen])
def test_as_many_as_torch_counts(made: type[nn.Module]) -> None:
    model, shape = made(), (2, 3, 32, 24)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(shape)).sum().backward()
    assert count(model, shape) == counter.get_total_flops() > 0


def test_groups_divide_forward_and_both_gradients() -> None:
    """Torch's own counter divides all but the weights' gradient."""
    whole = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3))
    depthwise = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=16))
    shape, first, each = (1, 3, 9, 9), 2 * (2 * 9 * 9 * 3 * 16), 3 * (2 * 7 * 7 * 16 * 9)
    assert (count(whole, shape), count(depthwise, shape)) == (first + 16 * each, first + each)


def test_fused_attention_counts_as_its_two_products() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(3, 24, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).flatten(2).transpose(1, 2).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v).mean(1)

    positions, width = 6 * 5, 8
    projected = 2 * 2 * positions * 3 * 24 * 2  # forward and its weights' gradient; the image has none
    attended = 3 * 2 * 2 * (2 * positions * positions * width)
    assert count(Fused(), (2, 3, 6, 5)) == projected + attended
