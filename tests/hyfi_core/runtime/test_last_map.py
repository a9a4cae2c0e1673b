"""Models that cut their image into tiles are explained by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from tests.harness import run_copies

SIDE = 8


def gated(model: Any, vectors: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(model.score(vectors.tanh()), 1) * vectors).sum(1)


def product(model: Any, vectors: torch.Tensor) -> torch.Tensor:
    return (torch.softmax(model.score(vectors.tanh()), 1).transpose(1, 2) @ vectors).squeeze(1)


POOLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "mean": lambda model, vectors: vectors.mean(1),
    "max": lambda model, vectors: vectors.amax(1),
    "gated": gated,
    "product": product,
}


class OfTiles(nn.Module):
    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.encoder = nn.Sequential(nn.Conv2d(3, 5, 4, 4), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.score, self.fc = nn.Linear(5, 1), nn.Linear(5, 2)

    def vectors(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        x = (x - 0.5) / 0.25  # a map of the image's size, which explains nothing
        x = x.view(b, c, h // SIDE, SIDE, w // SIDE, SIDE).permute(0, 2, 4, 1, 3, 5).reshape(-1, c, SIDE, SIDE)
        return self.encoder(x).view(b, -1, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(POOLS[self.pool](self, self.vectors(x)))


@pytest.mark.parametrize(
    ("pool", "images", "grid", "cells"),
    [
        ("mean", 2, (2, 2), None),
        ("max", 2, (1, 2), (2, 1)),
        ("gated", 1, (1, 1), (2, 3)),
        ("gated", 2, (1, 1), None),
        ("product", 2, (2, 1), None),
    ],
)
def test_contributions_of_tiles_and_bias_sum_to_the_logit(
    pool: str, images: int, grid: tuple[int, int], cells: tuple[int, int] | None
) -> None:
    torch.manual_seed(0)
    model, x = OfTiles(pool).double(), torch.randn(images, 3, 24, 40, dtype=torch.float64)

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=(grid,), cells=cells, gather_bytes=0)
        return hyfi_core.parallelize(module, tuple(x.shape), plan, comm).explain(x)

    logits, maps, positions = run_copies(model, grid[0] * grid[1], body)[0]
    assert maps.shape == (images, 2, 3, 5)
    assert positions is None
    torch.testing.assert_close(logits, model(x).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(maps.double().sum((2, 3)) + model.fc.bias, model(x), rtol=1e-5, atol=1e-5)
    if pool == "mean":
        wanted = torch.einsum("bnc,kc->bkn", model.vectors(x), model.fc.weight).view(images, 2, 3, 5) / 15
        torch.testing.assert_close(maps, wanted.float(), rtol=1e-5, atol=1e-6)
    if pool in ("gated", "product"):
        weights = torch.softmax(model.score(model.vectors(x).tanh()), 1)
        wanted = torch.einsum("bnc,kc->bkn", weights * model.vectors(x), model.fc.weight).view(images, 2, 3, 5)
        torch.testing.assert_close(maps, wanted.float(), rtol=1e-5, atol=1e-6)
