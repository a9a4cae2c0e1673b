"""Tiles that are encoded group by group: each rank has some of each group, and nothing is gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.plan import ParallelPlan
from hyfi_core.runtime.calls.last_map import has_last_map
from tests.harness import captured_once, compare, identity, one_process, parallel

SIDE = 8
SHAPE = (1, 3, 24, 40)  # 3 x 5 tiles

LOOPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "groups": lambda tiles: tiles.split(4),
    "slices": lambda tiles: [tiles[start : start + 7] for start in range(0, len(tiles), 7)],
    "chunks": lambda tiles: tiles.chunk(3),
    "behind first": lambda tiles: [tiles[9:], tiles[:9]],
    "single tiles": lambda tiles: [tile[None] for tile in tiles],
    "grown from nothing": lambda tiles: tiles.split(4),
}


class Looping(nn.Module):
    """Each group has batch norm of its own statistics, and tokens whose heads share a dim with tiles."""

    def __init__(self, loop: str) -> None:
        super().__init__()
        self.loop, self.first = loop, nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.BatchNorm2d(6), nn.ReLU())
        self.attention, self.fc = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 2)

    def extra_repr(self) -> str:
        return self.loop

    def encode(self, tiles: torch.Tensor) -> torch.Tensor:
        tokens = self.first(tiles).flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        tiles = x.view(b, c, h // SIDE, SIDE, w // SIDE, SIDE).permute(0, 2, 4, 1, 3, 5).reshape(-1, c, SIDE, SIDE)
        groups = [self.encode(group) for group in LOOPS[self.loop](tiles)]
        if self.loop == "grown from nothing":
            vectors = x.new_zeros(0)
            for group in groups:
                vectors = torch.cat([vectors, group])
        else:
            vectors = torch.cat(groups)
        return self.fc(vectors.view(b, -1, 6).amax(1))


def model_of(loop: str) -> nn.Module:
    torch.manual_seed(0)
    return Looping(loop).double()


@pytest.mark.parametrize(
    ("loop", "images", "plan"),
    [
        ("groups", 1, {"grids": ((2, 2),)}),
        ("slices", 2, {"grids": ((1, 2),)}),
        ("chunks", 1, {"grids": ((3, 1),)}),
        ("groups", 2, {"grids": ((1, 1),), "cells": (2, 2)}),
        ("grown from nothing", 1, {"grids": ((2, 2),)}),
    ],
)
def test_groups_equal_one_process(loop: str, images: int, plan: dict[str, Any]) -> None:
    model, shape = model_of(loop), (images, *SHAPE[1:])
    x, labels = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.ones(images)
    chosen = ParallelPlan(**plan, gather_bytes=0)
    found = parallel(model, x, labels.long(), chosen, F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), x, labels.long(), 1, F.cross_entropy, identity))
    if plan["grids"] == ((3, 1),):  # whole rows of tiles on each rank: they are in order
        assert not any(rank["halo"]["messages"] for rank in found.traffic)


@pytest.mark.parametrize("loop", ["behind first", "single tiles"])
def test_other_loops_gather_what_is_small(loop: str) -> None:
    model, x = model_of(loop), torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = parallel(model, x, torch.tensor([1]), ParallelPlan(grids=((1, 2),)), F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), x, torch.tensor([1]), 1, F.cross_entropy, identity))


def test_single_tiles_are_refused_where_the_image_is_large() -> None:
    program = captured_once(model_of("single tiles"), SHAPE, torch.float64)
    with pytest.raises(RequestError, match=r"single tiles.*all tiles at once.*plan\.gather_bytes=23040 or more"):
        lower(program, Target((1, 2), 0, gather_bytes=0))


def test_vectors_of_groups_are_not_a_map() -> None:
    """Their places in the image are not known."""
    program = captured_once(model_of("groups"), SHAPE, torch.float64)
    ranked = lower(program, Target((2, 2), 0, gather_bytes=0))
    assert not has_last_map(ranked)
