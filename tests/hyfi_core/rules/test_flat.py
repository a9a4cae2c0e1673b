"""Flattened space: heads that pool over all positions equal one process on any grid, and gather nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.plan import ParallelPlan
from tests.harness import assert_equal_also_by_cells, captured_once, compare, identity, one_process, parallel

GRIDS = [pytest.param((1, 2), marks=pytest.mark.soak), (3, 2), (5, 1)]
SHAPE = (2, 3, 18, 21)  # 9 x 11 and then 4 x 5 positions: uneven, and on five rows a part that owns nothing


class Headed(nn.Module):
    """A small body to 4 x 5 positions of 6 channels, and a head on their flattened map (B, N, C)."""

    def __init__(self, head: Callable[[nn.Module, torch.Tensor], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2))
        for name, module in modules.items():
            self.add_module(name, module)
        self.fc = nn.Linear(6, 2)
        self.head = head

    def extra_repr(self) -> str:
        return str(self.head)  # programs are captured once for each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.body(x).flatten(2).transpose(1, 2)
        return self.fc(self.head(self, tokens))


def gated(model: Any, x: torch.Tensor) -> torch.Tensor:
    scores = model.w(torch.tanh(model.v(x)) * torch.sigmoid(model.u(x)))
    return (torch.softmax(scores, 1) * x).sum(1)


def gated_bmm(model: Any, x: torch.Tensor) -> torch.Tensor:
    scores = model.w(torch.tanh(model.v(x)) * torch.sigmoid(model.u(x)))
    return torch.bmm(F.softmax(scores.transpose(1, 2), dim=-1), x).squeeze(1)


def few_queries(model: Any, x: torch.Tensor) -> torch.Tensor:
    b, n, c = x.shape
    query = model.v.weight[:3].view(1, 3, 2, 3).expand(b, 3, 2, 3).transpose(1, 2)
    key, value = (layer(x).view(b, n, 2, 3).transpose(1, 2) for layer in (model.u, model.v))
    pooled = F.scaled_dot_product_attention(query, key, value)
    return pooled.transpose(1, 2).reshape(b, 3, c).mean(1)


def self_attention(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.attention(x, x, x, need_weights=False)[0].mean(1)


def global_context(model: Any, x: torch.Tensor) -> torch.Tensor:
    weights = F.softmax(model.w(x), dim=1)
    context = torch.matmul(x.transpose(1, 2).unsqueeze(1), weights.unsqueeze(1)).squeeze(1).squeeze(-1)
    return (x + context.unsqueeze(1)).mean(1)


def linear_attention(model: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = F.softmax(model.v(x), -1), F.softmax(model.u(x), 1), x
    return torch.einsum("bnc,bcd->bnd", q, torch.einsum("bnc,bnd->bcd", k, v)).mean(1)


def spread(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.std(x, 1) + x.var(1, unbiased=False) + torch.linalg.vector_norm(x, dim=1)


def with_dropout(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.norm(F.gelu(x)).amax(1)


def first_token(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.mean(1, keepdim=True), x], 1)[:, 0]


HEADS: dict[str, Any] = {
    "mean": lambda m, x: x.mean(1),
    "max": with_dropout,
    "max and where": lambda m, x: x.max(1)[0],
    "logsumexp": lambda m, x: torch.logsumexp(x, 1) + F.log_softmax(x, 1).sum(1) / 9,
    "std": spread,
    "gated": gated,
    "gated bmm": gated_bmm,
    "few queries": few_queries,
    "self-attention": self_attention,
    "global context": global_context,
    "linear attention": linear_attention,
    "class token": first_token,
    "top-k": lambda m, x: x.topk(3, 1)[0].mean(1),
    "and back": lambda m, x: m.norm(x).transpose(1, 2).reshape(x.shape[0], 6, 4, 5).amax((2, 3)),
    "positions": lambda m, x: (x + m.table.weight[None, :20]).mean(1) + (x * m.table.weight[:20, :1]).sum(1),
}
GATHERED = {"self-attention", "class token", "top-k", "max and where"}


def headed(name: str) -> Headed:
    torch.manual_seed(0)
    modules = {"u": nn.Linear(6, 6), "v": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}
    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    w = nn.Linear(6, 1)
    return Headed(HEADS[name], **modules, w=w, attention=attention, table=nn.Embedding(24, 6))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_one_process(name: str, grid: tuple[int, int]) -> None:
    assert_equal_also_by_cells(headed(name), SHAPE, grid)


@pytest.mark.parametrize("name", sorted(set(HEADS) - GATHERED))
@pytest.mark.parametrize("training", [True, False])
def test_no_position_is_gathered(name: str, training: bool) -> None:
    program = captured_once(headed(name).double().train(training), SHAPE, torch.float64)  # captured above already
    ranked = lower(program, Target((2, 2), 1, gather_bytes=0))
    assert ranked.gathered == ()


def test_what_is_gathered_is_said_and_what_is_too_large_is_refused() -> None:
    program = capture(headed("self-attention"), SHAPE, torch.float32)
    said = lower(program, Target((2, 2), 1)).gathered
    keys_and_values = [line for line in said if "scaled_dot_product_attention" in line]
    assert len(keys_and_values) == 2
    assert all("960 bytes" in line for line in keys_and_values)
    with pytest.raises(RequestError, match=r"attention between all positions.*960 bytes.*gather_bytes=960"):
        lower(program, Target((2, 2), 1, gather_bytes=959))


def test_a_stage_may_begin_with_a_flat_map() -> None:
    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Flatten(2))
            self.fc = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(F.gelu(self.body(x)).mean(2))

    torch.manual_seed(0)
    model, images, labels = Staged().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    plan = ParallelPlan(grids=((3, 1), (1, 2)), cuts=("body",), microbatches=2)
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, 2, F.cross_entropy, identity))
