"""Windows, blocks and grids by views, as Swin, MaxViT and space-to-depth write them: exact, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from tests.harness import assert_answers_equal_one_process, run_copies

Tensor = torch.Tensor
SHAPE = (2, 3, 16, 23)  # a map of 8 x 12: 4 x 6 windows of 2 x 2, and on five rows of ranks one owns nothing


def windows(y: Tensor, k: int = 2) -> Tensor:
    """(B, C, H, W) -> (B · windows, k · k, C), as Swin (Liu et al., 2021)."""
    b, c, h, w = y.shape
    x = y.permute(0, 2, 3, 1).view(b, h // k, k, w // k, k, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, k * k, c)


def together(x: Tensor, h: int, w: int, k: int = 2) -> Tensor:
    c = x.shape[-1]
    y = x.view(-1, h // k, w // k, k, k, c).permute(0, 1, 3, 2, 4, 5).contiguous()
    return y.view(-1, h, w, c).permute(0, 3, 1, 2)


def grid(y: Tensor, k: int = 2) -> Tensor:
    """(B, C, H, W) -> (B · H/k · W/k, k · k, C): every (H/k)th row together, as MaxViT (Tu et al., 2022)."""
    b, c, h, w = y.shape
    x = y.permute(0, 2, 3, 1).view(b, k, h // k, k, w // k, c)
    return x.permute(0, 2, 4, 1, 3, 5).contiguous().view(-1, k * k, c)


def ungrid(x: Tensor, h: int, w: int, k: int = 2) -> Tensor:
    c = x.shape[-1]
    y = x.view(-1, h // k, w // k, k, k, c).permute(0, 3, 1, 4, 2, 5).contiguous()
    return y.view(-1, h, w, c).permute(0, 3, 1, 2)


def attention(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Two heads; the mask is one for each window of an image."""
    n, positions, c = x.shape
    q, k, v = torch.cat([x, -x, x * 2], 2).reshape(n, positions, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1)
    scores = scores + torch.arange(2 * positions * positions).view(1, 2, positions, positions).cos().double()
    if mask is not None:
        scores = scores.view(-1, len(mask), 2, positions, positions) + mask.unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, 2, positions, positions)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, positions, c)


def swin(y: Tensor) -> Tensor:
    mask = torch.arange(24 * 16).view(24, 4, 4).sin().double()
    return together(attention(windows(y), mask), *y.shape[2:])


def squares(y: Tensor) -> Tensor:
    """Windows of 4 x 4 that stay squares for a layer, as timm has them."""
    b, c, h, w = y.shape
    x = y.permute(0, 2, 3, 1).view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).contiguous()
    return torch.tanh(x.view(-1, 4, 4, c) * 2).flatten(1, 2)


def fused(y: Tensor) -> Tensor:
    x = windows(y).unflatten(2, (2, 3)).transpose(1, 2)
    x = F.scaled_dot_product_attention(x, -x, x * 2, attn_mask=torch.arange(16).view(1, 1, 4, 4).sin().double())
    return together(x.transpose(1, 2).flatten(2), *y.shape[2:])


def maxvit(y: Tensor) -> Tensor:
    return ungrid(attention(grid(y)), *y.shape[2:]) + y


def columns(y: Tensor) -> Tensor:
    """Rows of every column apart, (B · W, H, C), and back: the strip that stays is whole on no rank."""
    b, c, h, w = y.shape
    x = torch.tanh(y.permute(0, 3, 2, 1).reshape(b * w, h, c) @ torch.ones(c, c).double())
    return x.view(b, w, h, c).permute(0, 3, 2, 1)


def to_depth(y: Tensor) -> Tensor:
    b, c, h, w = y.shape
    return y.view(b, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(b, 4 * c, h // 2, w // 2)


def to_space(y: Tensor) -> Tensor:
    b, _, h, w = y.shape
    return y[:, :4].view(b, 2, 2, 1, h, w).permute(0, 3, 4, 1, 5, 2).reshape(b, 1, 2 * h, 2 * w)


def merged(y: Tensor) -> Tensor:
    x = y.permute(0, 2, 3, 1)
    b, h, w, c = x.shape
    return x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": swin,
    "fused attention": fused,
    "windows of another size": lambda y: together(windows(y, 2).softmax(1), 8, 12) * y,
    "large windows": lambda y: together(attention(windows(y, 4)), 8, 12, 4),
    "large squares": lambda y: together(attention(squares(y) @ torch.ones(6, 6).double().tril()), 8, 12, 4),
    "small grid": lambda y: ungrid(attention(grid(y, 4)), 8, 12, 4),
    "blocks of three columns": lambda y: y.unflatten(3, (4, 3)).amax(4).unflatten(2, (4, 2)).mean(3),
    "windows that stay": lambda y: windows(y).sum(1) + windows(y).amax((1, 2))[:, None],
    "all windows at once": lambda y: (
        windows(y).var(0) * windows(y).amax((0, 1)) + windows(y).logsumexp(2).mean(0)[:, None]
    ),
    "grid": maxvit,
    "columns": columns,
    "space to depth": to_depth,
    "depth to space": to_space,
    "merged": merged,
    "shuffle": lambda y: F.pixel_shuffle(y[:, :4], 2).sum(1) + F.pixel_unshuffle(y, 2).mean() + to_depth(y).mean(),
    "tiles": lambda y: y.view(2, 6, 2, 4, 2, 6).mean((2, 4)),
    "repeated": lambda y: y[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 3).reshape(2, 6, 16, 36),
}


LONG = [pytest.param(grid, marks=pytest.mark.soak) for grid in ((1, 2), (2, 1), (3, 2))]


@pytest.mark.parametrize("ranks", [(2, 2), (5, 1), *LONG])
def test_blocks_equal_one_process(ranks: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, SHAPE, ranks)


class Dropping(nn.Module):
    """Window attention that drops weights, features and whole paths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        x = windows(torch.roll(y, (-1, -1), (2, 3)))
        weights = F.dropout((x @ x.transpose(1, 2)).softmax(-1), 0.3, self.training)
        x = F.dropout(weights @ x, 0.2, self.training)
        z = torch.roll(together(x, *y.shape[2:]), (1, 1), (2, 3))
        path = torch.empty(len(y), 1, 1, 1, dtype=y.dtype).bernoulli_(0.5)
        return self.fc((y + z * path).mean((2, 3)))


def test_what_windows_drop_is_the_same_on_any_plan() -> None:
    torch.manual_seed(0)
    model = Dropping().double()
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])

    def trained(grid: tuple[int, int], microbatches: int) -> tuple[float, dict[str, Tensor]]:
        plan = hyfi_core.ParallelPlan((grid,), microbatches=microbatches, gather_bytes=0)

        def body(comm: Any, module: nn.Module) -> Any:
            engine = hyfi_core.parallelize(module, SHAPE, plan, comm)
            return engine.accumulate(images, labels), engine.gather_gradients()

        torch.manual_seed(1)
        found: tuple[float, dict[str, Tensor]] = run_copies(model, plan.ranks, body)[0]
        return found

    loss, gradients = trained((1, 1), 1)
    for grid, microbatches in (((2, 2), 1), ((5, 1), 2)):
        other, found = trained(grid, microbatches)
        assert other == pytest.approx(loss, abs=1e-12)
        for name, gradient in gradients.items():
            assert (found[name] - gradient).abs().max() < 1e-10, name
