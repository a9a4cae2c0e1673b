"""What each tile says of its slide: alone, and as a share of the slide's logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.models.aggregators.by_name import build_aggregator
from tests.hyfi_core.tiles.bags import WIDTH, bags, small_cnn

Plan = hyfi_core.ParallelPlan


@pytest.mark.parametrize("name", ["gated_attention", "dsmil", "transmil"])
def test_what_tiles_say(name: str) -> None:
    torch.manual_seed(2)
    encoder, aggregator = small_cnn().double(), build_aggregator(name, WIDTH, 3, {"hidden": 16}).double()
    (slide,) = bags([7])

    def body(comm: Any) -> Any:
        parts = copy.deepcopy(encoder), copy.deepcopy(aggregator)
        return hyfi_core.parallelize_tiles(*parts, Plan(tiles=comm.size), comm, chunk=2).explain(slide)

    one, *several = [found for ranks in (1, 3) for found in run_ranks(ranks, body)]
    encoder.eval(), aggregator.eval()
    with torch.no_grad():
        vectors = encoder(slide.read(range(7)))
        logits, attention = aggregator(vectors)
        alone = torch.stack([aggregator(vector[None])[0] for vector in vectors])
    assert torch.allclose(one.logits, logits)
    assert torch.allclose(one.alone, alone)
    assert torch.allclose(one.contributions, attention[:, None] * alone)
    assert (name == "gated_attention") == torch.allclose(one.contributions.sum(0), logits)
    for other in several:
        assert torch.allclose(other.alone, one.alone)
        assert torch.equal(other.attention, several[0].attention)


def test_what_tiles_say_without_attention() -> None:
    linear = nn.Linear(WIDTH, 2).double()

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = linear

        def forward(self, bag: torch.Tensor) -> torch.Tensor:
            return self.head(bag.mean(0))

    encoder, (slide,) = small_cnn().double(), bags([5])
    found = hyfi_core.parallelize_tiles(encoder, Mean(), Plan(tiles=1), AloneCommunicator()).explain(slide)
    assert found.attention is None
    assert torch.allclose(found.contributions.sum(0) + linear.bias, found.logits)
    assert torch.allclose(found.alone.mean(0), found.logits)


@pytest.mark.parametrize(("rows", "more"), [(8, 0), (3, 1)])
def test_attention_is_that_of_the_tiles_whatever_dims_there_are(rows: int, more: int) -> None:
    class Heads(nn.Module):
        """Attention in more heads than a short slide has tiles, or with a token that is no tile."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.score = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, rows)

        def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            attention = self.score(bag).softmax(0).mT
            return self.head(attention.mean(0) @ bag), nn.functional.pad(attention, (more, 0))

    torch.manual_seed(4)
    encoder, aggregator, (slide,) = small_cnn().double(), Heads().double(), bags([5])
    found = hyfi_core.parallelize_tiles(encoder, aggregator, Plan(tiles=1), AloneCommunicator()).explain(slide)
    if more:
        assert found.attention is None
        return
    encoder.eval()
    with torch.no_grad():
        attention = aggregator(encoder(slide.read(range(5))))[1].mean(0)
    assert torch.allclose(found.attention, attention)
    assert torch.allclose(found.contributions.sum(0), found.logits)
