"""Models that view their image as tiles: each rank encodes its own, and all equals one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.plan import ParallelPlan
from tests.harness import Result, compare, identity, one_process, parallel, run_copies

SIDE = 8  # of a tile
WIDTH = 6  # of its vector
SHAPE = (2, 3, 24, 40)  # 3 x 5 tiles: on two rows and two columns of ranks, cuts would be inside of tiles


def viewed(x: torch.Tensor) -> torch.Tensor:
    b, c, h, w = x.shape
    return x.view(b, c, h // SIDE, SIDE, w // SIDE, SIDE).permute(0, 2, 4, 1, 3, 5).reshape(-1, c, SIDE, SIDE)


def scaled_between(x: torch.Tensor) -> torch.Tensor:
    b, c, h, w = x.shape
    tiles = x.reshape(b, c, h // SIDE, SIDE, w // SIDE, SIDE).sub(0.5).permute(0, 2, 4, 1, 3, 5) / 0.25
    return tiles.reshape(b, -1, c, SIDE, SIDE).flatten(0, 1)


def unfolded(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, SIDE, SIDE)


def overlapping(x: torch.Tensor) -> torch.Tensor:
    half = SIDE // 2
    return x.unfold(2, SIDE, half).unfold(3, SIDE, half).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, SIDE, SIDE)


def columns(x: torch.Tensor) -> torch.Tensor:
    return F.unfold(x, SIDE, stride=SIDE).transpose(1, 2).reshape(-1, x.shape[1], SIDE, SIDE)


def columns_first(x: torch.Tensor) -> torch.Tensor:
    b, c = x.shape[:2]
    return F.unfold(x, SIDE, stride=SIDE).view(b, c, SIDE, SIDE, -1).permute(0, 4, 1, 2, 3).flatten(0, 1)


def windows(x: torch.Tensor) -> torch.Tensor:
    """As in Swin and ViTDet: channels last, padded to whole windows."""
    x = x.permute(0, 2, 3, 1)
    b, h, w, c = x.shape
    x = F.pad(x, (0, 0, 0, -w % SIDE, 0, -h % SIDE))
    down, across = -(-h // SIDE), -(-w // SIDE)
    x = x.view(b, down, SIDE, across, SIDE, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, SIDE, SIDE, c)
    return x.permute(0, 3, 1, 2)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": viewed,
    "scaled between": scaled_between,
    "unfold": unfolded,
    "overlapping": overlapping,
    "im2col": columns,
    "im2col, channels first": columns_first,
    "einops": lambda x: rearrange(x, "b c (h p) (w q) -> (b h w) c p q", p=SIDE, q=SIDE),
    "windows": windows,
    "cropped": lambda x: viewed(x[:, :, : x.shape[2] // SIDE * SIDE, : x.shape[3] // SIDE * SIDE]),
}


def cnn() -> nn.Module:
    """A network with batch norm of maps and of vectors, and what else has a rule of its own for tiles."""
    body = [nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.0)]
    maps = [nn.Conv2d(4, WIDTH, 3, 1, 1), nn.GroupNorm(2, WIDTH), nn.GELU(), nn.InstanceNorm2d(WIDTH, affine=True)]
    more = [nn.Upsample(scale_factor=2.0), nn.AvgPool2d(3, 2, 1), nn.LocalResponseNorm(2), nn.Conv2d(WIDTH, 8, 2, 2)]
    end = [nn.Flatten(2), nn.Conv1d(8, WIDTH, 3, 1, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.BatchNorm1d(WIDTH)]
    return nn.Sequential(*body, *maps, *more, *end)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.AdaptiveAvgPool2d(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens: torch.Tensor = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.block(tokens)[:, 0]


def gated(model: Any, vectors: torch.Tensor) -> torch.Tensor:
    scores = model.w(torch.tanh(model.v(vectors)) * torch.sigmoid(model.u(vectors)))
    return (torch.softmax(scores, 1) * vectors).sum(1)


POOLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "mean": lambda model, vectors: vectors.mean(1),
    "max": lambda model, vectors: vectors.max(1).values,
    "gated attention": gated,
}


class OfTiles(nn.Module):
    """Tiles of the image, an encoder, an aggregator of their vectors, a linear layer."""

    def __init__(self, view: str, pool: str, encoder: nn.Module) -> None:
        super().__init__()
        self.kind, self.encoder = (view, pool), encoder
        if pool == "gated attention":
            self.u, self.v, self.w = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5), nn.Linear(5, 1)
        self.fc = nn.Linear(WIDTH, 2)

    def extra_repr(self) -> str:
        return str(self.kind)  # programs are captured once for each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view, pool = self.kind
        vectors = self.encoder(VIEWS[view](x)).reshape(len(x), -1, WIDTH)
        return self.fc(POOLS[pool](self, vectors))


def assert_equal(model: nn.Module, shape: tuple[int, int, int, int], plan: ParallelPlan) -> list[dict[str, Any]]:
    """Compare a training step with that of one process; return the traffic of the ranks."""
    images = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(shape[0]) % 2
    found = parallel(model.double(), images, labels, plan, F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, plan.microbatches, F.cross_entropy, identity))
    return found.traffic


def model_of(view: str, pool: str, encoder: Callable[[], nn.Module] = cnn) -> OfTiles:
    torch.manual_seed(0)
    return OfTiles(view, pool, encoder())


@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_one_process_and_nothing_is_gathered(view: str) -> None:
    uneven = (2, 3, 27, 43) if view in ("unfold", "windows", "cropped") else SHAPE
    plan = ParallelPlan(grids=((2, 2),), gather_bytes=0)
    traffic = assert_equal(model_of(view, "mean", small), uneven, plan)
    image_bytes = 2 * 3 * 24 * 40 * 8
    # A gather is three quarters. Pixels of a tile across a cut move where something comes before the view.
    assert all(rank["halo"]["bytes"] < image_bytes / 4 for rank in traffic)
    if view in ("view", "scaled between", "einops"):
        assert not any(rank["halo"]["messages"] for rank in traffic)


@pytest.mark.parametrize("encoder", [cnn, Transformer])
@pytest.mark.parametrize("pool", POOLS)
def test_encoders_and_aggregators_equal_one_process(pool: str, encoder: Callable[[], nn.Module]) -> None:
    plan = ParallelPlan(grids=((1, 2),), gather_bytes=0)
    assert_equal(model_of("einops", pool, encoder), SHAPE, plan)


PLANS = {
    "one image": ((1, 3, 24, 40), ParallelPlan(grids=((3, 1),), gather_bytes=0)),
    "more ranks than tiles": (SHAPE, ParallelPlan(grids=((4, 3),), gather_bytes=0)),
    "cells": (SHAPE, ParallelPlan(grids=((1, 1),), cells=(2, 2), gather_bytes=0)),
    "cells of two ranks": (SHAPE, ParallelPlan(grids=((1, 2),), cells=(2, 1), spill="memory", gather_bytes=0)),
    "micro-batches": ((4, *SHAPE[1:]), ParallelPlan(grids=((2, 1),), microbatches=2, gather_bytes=0)),
    "stages": (
        (4, *SHAPE[1:]),
        ParallelPlan(grids=((2, 1), (1, 2)), cuts=("encoder.0",), microbatches=2, schedule="1f1b", gather_bytes=0),
    ),
    "encoder and aggregator": (SHAPE, ParallelPlan(grids=((2, 2), (1, 1)), cuts=("encoder",), gather_bytes=0)),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_equal_one_process(name: str) -> None:
    assert_equal(model_of("view", "gated attention", small), *PLANS[name])


def test_statistics_are_those_of_all_replicas() -> None:
    """Of maps and of vectors: two replicas of one image each are one process with both."""
    model = model_of("einops", "mean").double()
    images = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels, plan = torch.tensor([0, 1]), ParallelPlan(grids=((1, 2),), replicas=2, sync_batch_norm=True, gather_bytes=0)

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (1, *SHAPE[1:]), plan, comm, loss=F.cross_entropy)
        own = slice(comm.rank // 2, comm.rank // 2 + 1)
        loss = engine.accumulate(images[own], labels[own])
        return loss, engine.gather_gradients(), engine.gather_state_dict()

    found = run_copies(model, 4, body)[0]
    wanted = one_process(copy.deepcopy(model), images, labels, 1, F.cross_entropy, identity)
    compare(Result(*found, wanted.logits, []), wanted)


@pytest.mark.parametrize("plan", [{"grids": ((2, 2),)}, {"grids": ((1, 1),), "cells": (2, 2)}], ids=["ranks", "cells"])
def test_dropout_of_tiles_is_the_same_on_any_plan(plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(small(), nn.Flatten(), nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4))
    model = OfTiles("einops", "max", encoder).double()
    images = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, divided = (
        parallel(model, images, torch.tensor([0, 1]), ParallelPlan(**chosen, gather_bytes=0), F.cross_entropy, None)
        for chosen in ({"grids": ((1, 1),)}, plan)
    )
    compare(divided, alone)


def test_an_image_of_a_slide_takes_no_gather() -> None:
    """4480 x 8960 px, tiles of 224: with the default limit, of which the image is 14 times as large."""
    global_side = 224

    class OfSlide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tiles = rearrange(x, "b c (h p) (w q) -> (b h w) c p q", p=global_side, q=global_side)
            return self.encoder(tiles).view(len(x), -1, 8).mean(1)

    program = capture(OfSlide(), (1, 3, 4480, 8960), torch.float32)
    lowered = lower(program, Target((2, 4), 3))
    assert not lowered.gathered
    box = lowered.read_box
    assert box.shape == (10 * global_side, 10 * global_side)  # whole tiles of its own part


@pytest.mark.parametrize(
    ("pattern", "share"),
    [
        ("b c (h p) (w q) -> b (h w) (p q c)", (1, 1)),
        ("b c (h p) (w q) -> b (c p q) h w", (2, 3)),
        ("b c (h p) (w q) -> (h w b) c p q", (0, 0)),
        ("b c (h p) (w q) -> b h w (c p q)", (1, 2)),
        ("b c (p h) (q w) -> (b h w) (p q) c", (0, 0)),
        ("b c (p h) (q w) -> b (c p q) h w", (2, 3)),
    ],
)
def test_ranks_share_windows_and_not_their_pixels(pattern: str, share: tuple[int, int]) -> None:
    """2 x 3 windows of 16 x 16: the larger factor is that of pixels."""

    class Viewed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rearrange(x, pattern, p=16, q=16).square()

    program = capture(Viewed(), (2, 3, 32, 48), torch.float32)
    lowered = lower(program, Target((2, 2), 0, gather_bytes=0))
    result = next(op.first_output for op in program.operators if "pow" in op.text or "square" in op.text)
    assert lowered.splits[result].dims == share
