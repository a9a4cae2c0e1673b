"""Aggregators: formulas, order of tiles, gradients, one tile, and the engine that trains them."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.models.aggregators.abmilx import Abmilx
from hyfi_core.models.aggregators.by_name import AGGREGATORS, build_aggregator
from hyfi_core.models.aggregators.clam_sb import ClamSb
from hyfi_core.models.aggregators.dsmil import Dsmil
from hyfi_core.models.aggregators.gated_attention import GatedAttention
from hyfi_core.models.aggregators.max import MaxAggregator
from hyfi_core.models.aggregators.mean import MeanAggregator
from hyfi_core.models.aggregators.transmil import NystromLayer, TransMil, pseudo_inverse
from tests.patience import PATIENCE_S

D, K = 12, 3
SMALL = {name: {"hidden": 16} for name in AGGREGATORS if name not in ("mean", "max")}


def made(name: str) -> nn.Module:
    torch.manual_seed(7)
    return build_aggregator(name, D, K, SMALL.get(name)).double().eval()


def bag(tiles: int) -> torch.Tensor:
    return torch.randn(tiles, D, dtype=torch.float64, generator=torch.Generator().manual_seed(tiles))


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("tiles", [1, 2, 37])
def test_logits_attention_and_gradients(name: str, tiles: int) -> None:
    aggregator, tensor = made(name).train(), bag(tiles).requires_grad_()
    logits, attention = aggregator(tensor)
    assert logits.shape == (K,)
    assert attention.shape == (tiles,)
    assert attention.min() >= 0
    assert attention.sum().item() == pytest.approx(1, abs=1e-12)
    F.cross_entropy(logits[None], torch.tensor([1])).backward()
    assert tensor.grad is not None
    assert tensor.grad.isfinite().all()
    assert tensor.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in aggregator.parameters())


@pytest.mark.parametrize("name", AGGREGATORS)
def test_order_of_tiles_counts_in_transmil_only(name: str) -> None:
    aggregator, tiles = made(name), bag(31)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(1))
    logits, attention = aggregator(tiles)
    other, moved = aggregator(tiles[order])
    same = torch.allclose(logits, other, 1e-10, 1e-12) and torch.allclose(attention[order], moved, 1e-10, 1e-12)
    assert same == (name != "transmil")


def test_pooling_is_its_formula() -> None:
    tiles = bag(9)
    for kind, pooled in ((MeanAggregator, lambda scores: scores.mean(0)), (MaxAggregator, lambda s: s.amax(0))):
        one = kind(D, K).double()
        assert torch.allclose(one(tiles)[0], pooled(tiles @ one.classifier.weight.T + one.classifier.bias))


def gated(score: nn.Module, tiles: torch.Tensor) -> torch.Tensor:
    v, u = (tiles @ layer.weight.T + layer.bias for layer in (score.v, score.u))
    return ((v.tanh() * u.sigmoid()) @ score.w.weight[0] + score.w.bias).exp()


def test_gated_attention_and_clam_are_their_formulas() -> None:
    tiles = bag(9)
    one, clam = GatedAttention(D, K, 8).double(), ClamSb(D, K, 16).double().eval()
    compressed = (tiles @ clam.compress[0].weight.T + clam.compress[0].bias).clamp(min=0)
    for aggregator, features in ((one, tiles), (clam, compressed)):
        scores = gated(aggregator.score, features)
        expected = sum(a * h for a, h in zip(scores / scores.sum(), features, strict=True))
        assert torch.allclose(aggregator(tiles)[0], aggregator.classifier(expected))


def test_heads_of_gated_attention_are_single_ones_side_by_side() -> None:
    heads, tiles = GatedAttention(D, K, 8, heads=3, spread=4.0).double(), bag(9)
    logits, weights = heads.classifier.bias, []
    for number, columns in enumerate(heads.classifier.weight.split(D, 1)):
        one = GatedAttention(D, K, 8).double()
        own = {f"score.w.{name}": value[number, None] for name, value in heads.score.w.named_parameters()}
        last = {"classifier.weight": columns, "classifier.bias": torch.zeros(K)}
        one.load_state_dict(heads.state_dict() | own | last)
        part, attention = one(tiles)
        logits, weights = logits + part, [*weights, attention]
    assert torch.allclose(heads(tiles)[0], logits)
    assert torch.allclose(heads(tiles)[1], sum(weights) / 3)
    batched = heads(tiles[None])
    assert [batched[0].shape, batched[1].shape] == [(1, K), (1, 9)]
    assert torch.allclose(batched[0][0], logits)


def test_spread_multiplies_the_first_scores() -> None:
    narrow, wide = (torch.manual_seed(3) and GatedAttention(D, K, 8, spread=spread) for spread in (1.0, 8.0))
    assert torch.allclose(wide.score.w.weight, 8 * narrow.score.w.weight)
    assert torch.equal(wide.classifier.weight, narrow.classifier.weight)


def test_dsmil_is_its_formula() -> None:
    one, tiles = Dsmil(D, K, 8).double(), bag(9)
    scores, seen = one.tile_classifier(tiles), []
    for k in range(K):
        critical = one.query(tiles[scores[:, k].argmax()])
        weights = torch.stack([one.query(tile) @ critical / 8**0.5 for tile in tiles]).exp()
        seen.append(sum(w * one.information(tile) for w, tile in zip(weights / weights.sum(), tiles, strict=True)))
    expected = (scores.amax(0) + one.bag_classifier(torch.cat(seen))) / 2
    assert torch.allclose(one(tiles)[0], expected)


def test_abmilx_is_its_formula() -> None:
    one, tiles, pooled = Abmilx(D, K, 16, heads=2).double().eval(), bag(9), []
    x = F.gelu(one.compress[0](tiles))
    for part in (x[:, :8], x[:, 8:]):
        scores = one.score(part).squeeze(1)
        q, k = one.similarity(one.norm(part)).chunk(2, -1)
        scores = scores + (q @ k.T / 8**0.5).softmax(1) @ (one.shared * scores)
        pooled.append(scores.softmax(0) @ part)
    assert torch.allclose(one(tiles)[0], one.classifier(one.projection(torch.cat(pooled))))


def test_attention_by_as_many_landmarks_as_tokens_is_attention() -> None:
    torch.manual_seed(0)
    layer, x = NystromLayer(16, 2, 0.0, landmarks=11).double(), 0.3 * torch.randn(11, 16, dtype=torch.float64)
    q, k, v = layer.qkv(layer.norm(x)).unflatten(1, (3, 2, 8)).permute(1, 2, 0, 3)
    exact = F.scaled_dot_product_attention(q, k, v) + layer.along(v[None])[0]
    layer.qkv.weight.data *= 3  # else softmax is nearly flat, and its matrix singular
    q, k, v = layer.qkv(layer.norm(x)).unflatten(1, (3, 2, 8)).permute(1, 2, 0, 3)
    matrix = (q @ k.mT / 8**0.5).softmax(-1)
    exact = matrix @ v + layer.along(v[None])[0]
    near = matrix @ pseudo_inverse(matrix, 40) @ matrix @ v + layer.along(v[None])[0]
    assert torch.allclose(near, exact, 1e-6, 1e-8)
    inexact = matrix @ pseudo_inverse(matrix) @ matrix @ v + layer.along(v[None])[0]
    assert torch.allclose(layer(x), x + layer.output(inexact.transpose(0, 1).flatten(1)))
    assert layer.with_attention(x)[1].sum().item() == pytest.approx(1, abs=0.05)


def test_landmarks_are_means_of_equal_parts() -> None:
    layer, x = NystromLayer(16, 2, 0.0, landmarks=4).double(), torch.randn(10, 16, dtype=torch.float64)
    padded = F.pad(layer.norm(x), (0, 0, 2, 0))
    q, k, v = layer.qkv(padded).unflatten(1, (3, 2, 8)).permute(1, 2, 0, 3)
    few_q, few_k = (torch.stack([of[:, i : i + 3].mean(1) for i in (0, 3, 6, 9)], 1) for of in (q / 8**0.5, k))
    left, middle, right = ((a @ b.mT).softmax(-1) for a, b in ((q / 8**0.5, few_k), (few_q, few_k), (few_q, k)))
    mixed = left @ pseudo_inverse(middle) @ right @ v + layer.along(v[None])[0]
    assert torch.allclose(layer(x), x + layer.output(mixed.transpose(0, 1).flatten(1)[2:]))


def test_transmil_fills_the_square_with_the_first_tiles() -> None:
    aggregator, tiles = made("transmil"), bag(7)
    assert isinstance(aggregator, TransMil)
    filled = torch.cat([tiles, tiles[:2]])
    assert torch.allclose(aggregator(tiles)[0], aggregator(filled)[0])
    attention, of_square = aggregator(tiles)[1], aggregator(filled)[1]
    assert torch.allclose(attention[:2], of_square[:2] + of_square[7:], 1e-6, 1e-3)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_engine_trains_them(name: str) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, D)).double()
    aggregator = build_aggregator(name, D, K, SMALL.get(name)).double()
    slides = [hyfi_core.TensorTiles(torch.rand(n, 3, 4, 4, dtype=torch.float64)) for n in (5, 1)]
    engine = hyfi_core.parallelize_tiles(
        encoder, aggregator, hyfi_core.ParallelPlan(tiles=1), AloneCommunicator(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
    )  # fmt: skip
    losses = [engine.train_step(slides, torch.tensor([2, 0])) for _ in range(12)]
    assert losses[-1] < losses[0]
    logits, attention = engine.predict(slides)
    assert logits.shape == (2, K)
    assert attention is not None
    assert [len(one) for one in attention] == [5, 1]


def own(features: int, classes: int, scale: float = 1.0) -> nn.Module:
    return MeanAggregator(features, classes)


def test_names_are_light_and_refused() -> None:
    with pytest.raises(RequestError, match=r"model.aggregator.name: given 'gated'; allowed: mean, max, gated_att"):
        build_aggregator("gated", D, K)
    with pytest.raises(RequestError, match=r"model.aggregator.options.heads: mean does not take it"):
        build_aggregator("mean", D, K, {"heads": 2})
    with pytest.raises(RequestError, match=r"hidden is 10; use a multiple of heads, 4"):
        build_aggregator("abmilx", D, K, {"hidden": 10, "heads": 4})
    for aggregator, options, message in (
        ("gated_attention", {"heads": 0}, "heads is 0; use at least 1"),
        ("abmilx", {"heads": 0}, "heads is 0; use at least 1"),
        ("gated_attention", {"spread": 0.0}, "spread is 0.0; use a num"),
        ("gated_attention", {"spread": math.nan}, "spread is nan; use a num"),
    ):
        with pytest.raises(RequestError, match=message):
            build_aggregator(aggregator, D, K, options)
    assert isinstance(build_aggregator(f"{__name__}:own", D, K, {"scale": 2.0}), MeanAggregator)
    names = "from hyfi_core.models.aggregators.by_name import AGGREGATORS; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "False"
