"""Whether a model has a map for `Engine.explain` is known before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import NoMapError
from tests.harness import run_copies


class Pooled(nn.Module):
    """A map, a mean, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).relu().mean((2, 3)))


class Patched(nn.Module):
    """The image as patches of 4 px, and a mean over them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(48, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, h, w = x.shape
        x = x.view(b, 3, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 48)
        return self.head(self.first(x).tanh().mean(1))


@pytest.mark.parametrize("plan", [{"grids": ((1, 1),)}, {"grids": ((1, 2),)}, {"grids": ((1, 1),), "cells": (2, 2)}])
@pytest.mark.parametrize(("kind", "pools"), [(Pooled, True), (Patched, False)])
def test_a_map_is_known_before_a_run(plan: dict[str, Any], kind: type[nn.Module], pools: bool) -> None:
    chosen = hyfi_core.ParallelPlan(**plan)

    def body(comm: Communicator) -> tuple[bool | None, bool]:
        torch.manual_seed(0)
        engine = hyfi_core.parallelize(kind(), (1, 3, 16, 16), chosen, comm)
        known, images = engine.pools_a_map, torch.ones(1, 3, 16, 16)
        try:
            engine.explain(images)
        except NoMapError:
            return known, False
        return known, True

    assert run_ranks(chosen.ranks, body) == [(pools, pools)] * chosen.ranks


def test_a_plan_of_stages_does_not_say() -> None:
    net = nn.Sequential(Pooled().first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    plan = hyfi_core.ParallelPlan(grids=((1, 1), (1, 1)), cuts=("0",))
    found = run_copies(net, 2, lambda comm, own: hyfi_core.parallelize(own, (1, 3, 8, 8), plan, comm).pools_a_map)
    assert found == [None, None]
