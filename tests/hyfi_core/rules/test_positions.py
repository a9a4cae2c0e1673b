"""Operators over the positions of a flat map equal one process, without gathering the map."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core import ParallelPlan, parallelize
from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.rules.instructions import CollectiveCall
from tests.harness import (
    OffsetImages,
    assert_answers_equal_one_process,
    compare,
    identity,
    one_process,
    parallel,
    run_copies,
)

SHAPE = (2, 3, 13, 17)


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def best_positions(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    values, positions = net.score(tokens(x)).squeeze(-1).topk(5, 1)
    taken = torch.gather(tokens(x), 1, positions.unsqueeze(-1).expand(-1, -1, 6))
    return (taken * values.sigmoid().unsqueeze(-1)).mean(1)


def best_and_worst_scores(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    scores = net.score(tokens(x)).squeeze(-1)
    return torch.cat([scores.topk(3)[0], scores.topk(3, 1, largest=False)[0]], 1)


def by_index(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    """The scores decide which positions are taken, so they have no gradient."""
    positions = net.score(tokens(x)).squeeze(-1).topk(3, 1)[1]
    rows = torch.arange(x.shape[0]).unsqueeze(1)
    return tokens(x)[rows, positions].mean(1) + x.flatten(2)[:, :, [5, -1]].sum(-1)


def by_extreme(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(2)
    top, at = flat.max(-1)
    low = flat.min(-1, keepdim=True)[0].squeeze(-1)
    lowest = flat.gather(-1, flat.argmin(-1, keepdim=True)).squeeze(-1)
    return top + 0.1 * low + lowest + 0.01 * at + 0.01 * flat.argmax(-1)


def chosen(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    return torch.index_select(tokens(x), 1, torch.tensor([0, 40, 62, 7])).sum(1)


def with_ties(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).clamp(-0.1, 0.1).max(-1)[0] * x.flatten(2).clamp(-0.1, 0.1).min(-1)[0] + x.mean((2, 3))


def flat_norms(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(net.batch(x.flatten(2))) + net.group(x.flatten(2)).tanh()).pow(2).mean(-1)


class Pooled(nn.Module):
    """A small network that pools positions."""

    def __init__(self, pool: Callable[[Pooled, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.pool, self.stem, self.score, self.head = pool, nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(6, 1), nn.Linear(6, 2)
        self.batch, self.group = nn.BatchNorm1d(6), nn.GroupNorm(2, 6)

    def extra_repr(self) -> str:
        return self.pool.__name__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self, torch.tanh(self.stem(x))))


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize(
    "pool", [best_positions, best_and_worst_scores, by_index, by_extreme, chosen, with_ties, flat_norms]
)
def test_positions_equal_one_process_without_a_gathered_map(
    pool: Callable[[Pooled, torch.Tensor], torch.Tensor], grid: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = OffsetImages(Pooled(pool), (1, *SHAPE[1:])).double()
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    found = parallel(model, images, labels, ParallelPlan(grids=(grid,), gather_bytes=0), F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, 1, F.cross_entropy, identity))


@pytest.mark.parametrize("pool", [best_and_worst_scores, by_extreme])
def test_more_ranks_than_rows_leave_empty_parts(pool: Callable[[Pooled, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = Pooled(pool).double()
    images, labels = torch.randn((2, 3, 7, 9), dtype=torch.float64), torch.tensor([0, 1])
    plan = ParallelPlan(grids=((5, 1),), gather_bytes=0)
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, 1, F.cross_entropy, identity))


def test_what_fills_up_small_parts_is_not_taken_for_an_infinite_pixel() -> None:
    """Of seven rows on three ranks, two have two: fewer pixels than are taken. All but two pixels are infinite."""

    class Best(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, positions = x[:, 0].flatten(1).topk(20)
            return torch.stack([values.clamp(min=-9), positions.double()])

    image = torch.full((1, 1, 7, 9), -math.inf, dtype=torch.float64)
    image[0, 0, 6, 1:3] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plan = ParallelPlan(grids=((3, 1),), gather_bytes=0)

    def body(comm: Any, module: nn.Module) -> torch.Tensor:
        return parallelize(module, (1, 1, 7, 9), plan, comm).predict(image)  # type: ignore[no-any-return]

    values, positions = run_copies(Best(), 3, body)[0]
    assert values.tolist() == [[2, 1, *[-9] * 18]]
    assert len(set(positions[0].tolist())) == 20 and positions[0, :2].tolist() == [56, 55]


def test_candidates_of_all_ranks_have_the_shape_that_costs_are_computed_of() -> None:
    class Best(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(2).transpose(1, 2).topk(5, 1)[0]

    ranked = lower(capture(Best(), (2, 3, 7, 9), torch.float32), Target((1, 2), 0, gather_bytes=0))
    calls = [call for call in ranked.instructions if isinstance(call, CollectiveCall)]
    sent = [ranked.values[name].shape for call in calls for name in call.inputs if name is not None]
    assert sent == [(2, 2, 3, 5)] * 2  # values and places: (ranks, images, channels, candidates)


OUTSIDE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "gather": lambda y, at: y.flatten(2).gather(2, torch.full((2, 6, 1), at)).sum(2),
    "index_select": lambda y, at: y.flatten(2).index_select(2, torch.tensor([at])).sum(2),
    "index": lambda y, at: y.flatten(2)[:, :, torch.tensor([at])].sum(2),
}


@pytest.mark.parametrize("at", [-64, -1, 63])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_position_outside_of_the_map_is_an_error_as_in_one_process(name: str, at: int) -> None:
    """It was once read as 0."""

    def pool(net: Pooled, x: torch.Tensor) -> torch.Tensor:
        return OUTSIDE[name](x, at)

    pool.__name__ = f"{name} {at}"
    plan = ParallelPlan(grids=((9, 1),), gather_bytes=0)  # seven rows: ranks without pixels raise, too

    def body(comm: Any, module: nn.Module) -> torch.Tensor:
        engine = parallelize(module, SHAPE, plan, comm)
        return engine.predict(torch.ones(SHAPE, dtype=torch.float64))  # type: ignore[no-any-return]

    if name == "index" and at == -1:
        run_copies(Pooled(pool).double(), 9, body)
        return
    with pytest.raises(RuntimeError, match=r"an index is outside of \[(0|-63), 63\)"):
        run_copies(Pooled(pool).double(), 9, body)


SOME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the first": lambda y: tokens(y)[:, :11].mean(1),
    "the last": lambda y: tokens(y)[:, -1:].sum(1),
    "all but the first": lambda y: tokens(y)[:, 1:].logsumexp(1),
    "every other": lambda y: F.relu(tokens(y)[:, ::2]).amax(1),
    "one": lambda y: tokens(y).narrow(1, 5, 1).squeeze(1),
    "weighted": lambda y: (tokens(y)[:, 3:11].softmax(1) * tokens(y)[:, 3:11]).sum(1),
    "channels first": lambda y: y.flatten(2)[:, :, :11].norm(dim=2),
    "differences": lambda y: tokens(y).diff(dim=1).abs().mean(1),
    "repeated to a square": lambda y: torch.cat([tokens(y), tokens(y)[:, :2]], 1)[:, 1:].transpose(1, 2).sum(2),
    "padded": lambda y: F.pad(tokens(y), (0, 0, 2, 3), value=0.5).amax(1),
    "rows again": lambda y: tokens(y).transpose(1, 2).unflatten(2, y.shape[2:])[:, :, 1:, ::2],
    "behind the batch": lambda y: y.permute(0, 2, 3, 1).reshape(-1, 6)[3:].sum(0),
}


@pytest.mark.parametrize("grid", [(1, 2), (3, 2)])
def test_some_of_the_positions_equal_one_process(grid: tuple[int, int]) -> None:
    """By cells, slices of positions were once taken of rows and of columns."""
    assert_answers_equal_one_process(SOME, SHAPE, grid, gathers=True)


def with_class_token(net: Pooled, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([net.head.weight[:1].expand(x.shape[0], 1, -1), tokens(x)], 1).mean(1)


def test_a_map_too_large_to_gather_is_refused_with_the_limit_that_would_work() -> None:
    images = torch.randn(SHAPE, dtype=torch.float64)
    with pytest.raises(RequestError, match=r"aten.cat.*or plan.gather_bytes=6048 or more \(now 6047\)"):
        parallel(
            Pooled(with_class_token).double(), images, torch.tensor([0, 1]),
            ParallelPlan(grids=((2, 1),), gather_bytes=6047), F.cross_entropy, None,
        )  # fmt: skip
