"""What cannot be exact is refused by name, on all ranks, before the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyfi_core
from hyfi_core.comm.threads import run_ranks
from hyfi_core.tiles.aggregator_call import aggregator_call
from tests.hyfi_core.tiles.bags import WIDTH, Attention, BatchedMean, SmallViT, bags, sgd, small_cnn, token

Plan = hyfi_core.ParallelPlan
LABELS = torch.tensor([0, 1])


class Calls(nn.Module):
    """An encoder with a function of its features."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.project, self.function = nn.Linear(3, WIDTH), function

    def forward(self, tiles: torch.Tensor) -> Any:
        return self.function(self.project(tiles.mean((2, 3))))


def whole_call_dropped(x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand(()) < 0.5 else 2 * x


def redrawn(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: nn.functional.dropout(y, 0.5).exp(), x, use_reentrant=False)  # type: ignore[no-any-return]


def refused(encoder: nn.Module, aggregator: nn.Module | None = None, slides: Any = None, **more: Any) -> str:
    """Return the message with which two ranks refuse a step."""
    plan = more.pop("plan", Plan(tiles=2))

    def body(comm: Any) -> str:
        with pytest.raises(hyfi_core.RequestError) as raised:
            modules = copy.deepcopy(encoder), copy.deepcopy(aggregator or BatchedMean())
            engine = hyfi_core.parallelize_tiles(*modules, plan, comm, **more)
            engine.accumulate(bags((4, 3), torch.float32) if slides is None else slides, LABELS)
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda x: x - x.mean(0), "mixes the tiles of a call"),
        (whole_call_dropped, "draw for each tile"),
        (redrawn, "activation checkpointing"),
        (lambda x: (x, x), "output="),
        (lambda x: x[:, :, None], "output="),
        (lambda x: x[torch.randperm(len(x))], "randperm"),
        (lambda x: x + torch.rand(x.shape, generator=torch.Generator()), "torch.Generator"),
    ],
    ids=["mixes", "layer-drop", "checkpoint", "tuple", "map", "shuffle", "generator"],
)
def test_encoders_that_cannot_be_exact(function: Any, part: str) -> None:
    assert part in refused(Calls(function))


def test_norms_over_a_call_and_buffers_that_change() -> None:
    norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    assert "without running statistics" in refused(Calls(norm))
    spectral = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    assert "changes with every call" in refused(Calls(spectral))


def test_drawing_in_another_layout_is_computed_tile_by_tile() -> None:
    class SequenceFirst(nn.Dropout):  # tokens before tiles, joined into one dim
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.stack([x, 2 * x]).flatten(0, 1)).unflatten(0, (2, -1)).sum(0)

    slides = bags((4, 3), torch.float32)
    encoder, aggregator = Calls(SequenceFirst()), BatchedMean()

    def losses(comm: Any) -> list[float]:
        engines = [
            hyfi_core.parallelize_tiles(encoder, aggregator, Plan(tiles=1), comm, chunk=chunk) for chunk in (1, 4)
        ]
        return [engine.accumulate(slides, LABELS) for engine in engines]

    one, four = run_ranks(1, losses)[0]
    assert one == four


def test_slides_and_labels() -> None:
    empty = hyfi_core.TensorTiles(torch.zeros(0, 3, 16, 16), name="case 7")
    assert "slide 'case 7' has no tiles" in refused(small_cnn(), slides=[*bags((2,)), empty])
    assert "one TileSource" in refused(small_cnn(), slides=bags((2,))[0])
    assert "for 1 slides" in refused(small_cnn(), slides=bags((2,), torch.float32))
    wrong = hyfi_core.TensorTiles(torch.zeros(2, 3, 16, 16, dtype=torch.int32))
    assert "uint8 or floating point" in refused(small_cnn(), slides=[wrong, wrong])
    nowhere = [hyfi_core.TensorTiles(torch.zeros(2, 3, 16, 16))] * 2
    assert "takes coords" in refused(small_cnn(), Attention(), nowhere)


def test_other_slides_on_other_ranks() -> None:
    def body(comm: Any) -> None:
        engine = hyfi_core.parallelize_tiles(small_cnn(), BatchedMean(), Plan(tiles=2), comm)
        with pytest.raises(hyfi_core.RequestError, match="ranks disagree"):
            engine.accumulate(bags((4, 3 + comm.rank), torch.float32), LABELS)

    run_ranks(2, body)


def test_plans_and_settings() -> None:
    assert "plan has no tiles" in refused(small_cnn(), plan=Plan(grids=((1, 2),)))
    assert "needs 3 ranks" in refused(small_cnn(), plan=Plan(tiles=3))
    assert "'frozen' or 'exact'" in refused(small_cnn(), batch_norm="train")
    assert "chunk is 0" in refused(small_cnn(), chunk=0)
    for fields in ({"tiles": 2, "cells": (2, 2)}, {"tiles": 2, "grids": ((2, 2),)}, {"tiles": 0}, {}):
        with pytest.raises(hyfi_core.RequestError, match="tiles"):
            Plan(**fields)
    plan = Plan(tiles=4, replicas=2)
    assert plan.ranks == 8 and Plan.from_json(plan.to_json()) == plan
    assert "the 4 ranks of a replica share the tiles of each slide" in plan.describe()
    with pytest.raises(hyfi_core.RequestError, match="parallelize_tiles"):
        run_ranks(1, lambda comm: hyfi_core.parallelize(small_cnn(), (1, 3, 8, 8), Plan(tiles=1), comm))


def test_ambiguous_and_wrong_aggregators() -> None:
    class Both(nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features.flatten(0, -2)[:, :2].mean(0) * features.dim()

    class Rounded(nn.Module):
        """As kernels that round products of 16 bits differently if there is a batch."""

        def __init__(self, apart: float) -> None:
            super().__init__()
            self.apart = apart

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return (2 + features.flatten(0, -2)[:, :2].mean(0)) * (1 + self.apart * (features.dim() - 2))

    assert "returns different logits" in refused(small_cnn(), Both())
    assert "returns different logits" in refused(small_cnn(), Rounded(1e-2))
    for autocast, apart in ((None, 1e-4), (torch.bfloat16, 1e-2)):
        aggregator_call(Rounded(apart), autocast, torch.device("cpu"), WIDTH, torch.float32)
    assert "takes neither features" in refused(small_cnn(), nn.Linear(WIDTH, 2))


def test_a_promise_of_memory() -> None:
    assert "set it to at least" in refused(small_cnn(), plan=Plan(tiles=2, memory_bytes=1_000))

    def kept(memory_bytes: int | None) -> tuple[int, int]:
        def body(comm: Any) -> Any:
            plan = Plan(tiles=1, memory_bytes=memory_bytes)
            engine = hyfi_core.parallelize_tiles(
                SmallViT(), Attention(), plan, comm, output=token, optimizer=sgd, chunk=1
            )
            engine.train_step(bags((30, 30), torch.float32), LABELS)
            return engine.kept

        return run_ranks(1, body)[0]  # type: ignore[no-any-return]

    assert kept(None) == (60, 60)
    assert kept(2**40) == (60, 60)
