"""Steps over tiles equal one graph: each encoder, aggregator and division of tiles, chunks and slides, together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import hyfi_core
from hyfi_core.models.aggregators.by_name import build_aggregator
from tests.hyfi_core.tiles.bags import (
    WIDTH,
    Attention,
    Case,
    SmallResNet,
    SmallViT,
    assert_same,
    bags,
    convnext,
    dinov2,
    pooled,
    token,
)

LABELS = torch.tensor([0, 2, 1])
SIZES = (7, 1, 10)  # of the second slide, most ranks have none
ENCODERS: dict[str, tuple[Any, Any, str]] = {
    "vit": (SmallViT, token, "frozen"),
    "dinov2": (dinov2, pooled, "frozen"),
    "convnext": (convnext, pooled, "frozen"),
    "resnet, frozen norms": (SmallResNet, None, "frozen"),
    "resnet, exact norms": (SmallResNet, None, "exact"),
}
OPTIONS = {
    "gated_attention": {"heads": 2},
    "abmilx": {"hidden": 16, "heads": 2},
    "transmil": {"hidden": 16, "heads": 2},
}
AGGREGATORS = ("own, with coordinates", *OPTIONS)
PLANS = [hyfi_core.ParallelPlan(tiles=t, replicas=r) for t, r in product((1, 2, 3, 4), (1, 2))]
KEPT = ((1, 2), (1, None), (3, 0), (3, 1), (100, 0), (100, None))
"""(Tiles of a chunk, chunks that are kept), None: all."""


def case_of(encoder: str, aggregator: str, steps: int) -> Case:
    """Return a case with dropout in both parts, and drop-path or dropped channels in the encoder."""
    torch.manual_seed(0)
    make, output, norms = ENCODERS[encoder]
    pooling = Attention()
    if aggregator in OPTIONS:
        pooling = build_aggregator(aggregator, WIDTH, 3, {**OPTIONS[aggregator], "dropout": 0.25})
    of_encoder = make().double()
    return Case(of_encoder, pooling.double(), bags(SIZES), LABELS, output, batch_norm=norms, steps=steps)


def divisions(encoder: str) -> Iterator[tuple[hyfi_core.ParallelPlan, int, int | None]]:
    """Yield (plan, chunk, chunks kept). Exact norms have no chunks: all tiles of a slide are one, and are kept."""
    for plan, (chunk, keep) in product(PLANS, KEPT[-1:] if ENCODERS[encoder][2] == "exact" else KEPT):
        yield plan, chunk, keep


@pytest.mark.soak  # a few of them: test_exact.py
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_division_of_every_network_is_exact(encoder: str, aggregator: str) -> None:
    case, wanted = case_of(encoder, aggregator, 1), dict[int, Any]()
    for plan, chunk, keep in divisions(encoder):
        found = case.by_ranks(plan, chunk, keep)
        if plan.replicas not in wanted:
            wanted[plan.replicas] = case.one_process(case.seed, plan.replicas)
        assert_same(found, wanted[plan.replicas], 1e-10)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_twenty_steps_of_every_network_stay_with_one_process(encoder: str, aggregator: str) -> None:
    case = case_of(encoder, aggregator, 20)
    for tiles, replicas, chunk, keep in ((1, 1, 3, 1), (3, 1, 2, 0), (2, 2, 3, None)):
        whole = case.batch_norm == "exact"
        plan = hyfi_core.ParallelPlan(tiles=tiles, replicas=replicas)
        case.assert_exact(plan, 1e-8, chunk=chunk, keep=None if whole else keep)
