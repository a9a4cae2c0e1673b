"""A step over tiles equals one process with one graph over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.threads import run_ranks
from tests.hyfi_core.tiles.bags import (
    Attention,
    BatchedMean,
    Case,
    SmallViT,
    bags,
    convnext,
    dinov2,
    pooled,
    sgd,
    small_cnn,
    token,
)

Plan = hyfi_core.ParallelPlan
LABELS = torch.tensor([0, 2, 1])
SIZES = (7, 1, 10)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def vit(steps: int = 1, **more: Any) -> Case:
    return Case(SmallViT().double(), Attention().double(), bags(SIZES), LABELS, token, steps=steps, **more)


@pytest.mark.parametrize(
    ("plan", "chunk", "keep"),
    [
        (Plan(tiles=1), 4, 0),
        (Plan(tiles=1), 100, None),
        (Plan(tiles=2), 1, 2),
        (Plan(tiles=3), 4, None),
        (Plan(tiles=4), 2, 1),  # more ranks than the second slide has tiles
        (Plan(tiles=1, replicas=2), 3, 1),
        (Plan(tiles=2, replicas=2), 4, 0),  # one slide, and two
    ],
    ids=str,
)
def test_every_division_is_exact_with_dropout(plan: Any, chunk: int, keep: int | None) -> None:
    vit().assert_exact(plan, chunk=chunk, keep=keep)


def test_ranks_without_tags_are_exact() -> None:
    vit().assert_exact(Plan(tiles=2, replicas=2), keep=1, strict=True)


@pytest.mark.parametrize(
    ("encoder", "output"), [(small_cnn, None), (convnext, pooled), (dinov2, pooled)], ids=["cnn", "convnext", "dinov2"]
)
def test_encoders_are_exact(encoder: Any, output: Any) -> None:
    case = Case(encoder().double(), BatchedMean().double(), bags(SIZES), LABELS, output, batched=True)
    case.assert_exact(Plan(tiles=2), keep=1)


@pytest.mark.parametrize("plan", [Plan(tiles=1), Plan(tiles=3)], ids=str)
def test_batch_norm_is_exact_over_all_tiles(plan: Any) -> None:
    case = Case(small_cnn().double(), Attention().double(), bags(SIZES), LABELS, batch_norm="exact")
    assert not torch.equal(case.assert_exact(plan).state["encoder.1.running_mean"], torch.zeros(8))


def test_frozen_batch_norms_keep_their_statistics() -> None:
    case = Case(small_cnn().double(), Attention().double(), bags(SIZES), LABELS)
    state = case.assert_exact(Plan(tiles=2)).state
    assert torch.equal(state["encoder.1.running_mean"], torch.zeros(8, dtype=torch.float64))


def ranking(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss of all slides together: Cox's, with the labels as times."""
    risk, order = logits[:, 0], labels.argsort(descending=True)
    return (risk[order].logcumsumexp(0) - risk[order]).mean()


def test_a_loss_over_the_whole_batch_spans_replicas() -> None:
    vit(loss=ranking).assert_exact(Plan(tiles=1, replicas=3))


def test_twenty_steps_stay_with_one_process() -> None:
    vit(steps=20).assert_exact(Plan(tiles=2), tolerance=1e-8, keep=1)


def test_a_frozen_encoder_and_a_partly_frozen_one_are_exact() -> None:
    for names in ((), ("blocks.1",)):
        case = vit()
        for name, parameter in case.encoder.named_parameters():
            parameter.requires_grad_(name.startswith(names) if names else False)
        found = case.assert_exact(Plan(tiles=2), keep=0)
        assert any(name.startswith("encoder.") for name in found.gradients) == bool(names)


def test_autocast_equals_plain_autocast() -> None:
    encoder, aggregator, slides = SmallViT(0.0), Attention(), bags(SIZES, torch.float32)
    aggregator.drop = nn.Identity()  # type: ignore[assignment]

    def body(comm: Any) -> Any:
        engine = hyfi_core.parallelize_tiles(
            encoder, aggregator, Plan(tiles=1), comm, output=token, autocast=torch.bfloat16, chunk=3
        )
        return engine.accumulate(slides, LABELS), engine.gather_gradients()

    ((loss, gradients),) = run_ranks(1, body)
    for module in (encoder, aggregator):
        module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = [aggregator(encoder(s.read(range(len(s))))["cls"], s.coords)[0] for s in slides]
        plain = nn.functional.cross_entropy(torch.stack(logits), LABELS)
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-2)
    wanted = encoder.patches.weight.grad
    assert wanted is not None
    assert (gradients["encoder.patches.weight"] - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_in_a_callers_autocast_weights_converted_without_a_graph_are_not_cached(autocast: torch.dtype | None) -> None:
    """Before torch 2.11, what was tried or predicted left copies of the weights, and the step had no gradients."""
    seen = set[tuple[bool, bool]]()

    def note(*_: Any) -> None:
        seen.add((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))

    encoder, aggregator = SmallViT(), Attention()
    encoder.register_forward_pre_hook(note)
    aggregator.register_forward_pre_hook(note)

    def body(comm: Any) -> None:
        engine = hyfi_core.parallelize_tiles(encoder, aggregator, Plan(tiles=1), comm, output=token, autocast=autocast)
        with torch.autocast("cpu", torch.bfloat16):
            engine.explain(bags((2,), torch.float32)[0])
            engine.accumulate(bags(SIZES, torch.float32), LABELS)

    run_ranks(1, body)
    assert seen == {(False, False), (True, True)}


def test_bytes_are_scaled_and_earlier_gradients_are_kept() -> None:
    slides = [hyfi_core.TensorTiles(torch.full((2, 3, 16, 16), 255, dtype=torch.uint8), torch.zeros(2, 2))]
    ones = [hyfi_core.TensorTiles(torch.ones((2, 3, 16, 16)), torch.zeros(2, 2))]

    def body(comm: Any) -> Any:
        engine = hyfi_core.parallelize_tiles(
            SmallViT(0.0).eval(), Attention().eval(), Plan(tiles=1), comm, output=token
        )
        losses = engine.accumulate(slides, LABELS[:1]), engine.accumulate(ones, LABELS[:1])
        twice = engine.gather_gradients()
        engine._model.zero_grad()
        engine.accumulate(ones, LABELS[:1])
        return losses, twice, engine.gather_gradients()

    ((losses, twice, once),) = run_ranks(1, body)
    assert losses[0] == losses[1]
    assert all(torch.allclose(twice[name], 2 * once[name]) for name in once)


def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    slides = bags(SIZES)

    def body(comm: Any) -> Any:
        def made() -> Any:
            torch.manual_seed(1)
            modules = SmallViT().double(), Attention().double()
            return hyfi_core.parallelize_tiles(*modules, Plan(tiles=2), comm, output=token, optimizer=sgd, chunk=3)

        engine = made()
        first = [engine.train_step(slides, LABELS) for _ in range(2)]
        engine.save(tmp_path / "saved", extra={"seen": 2})
        on = [engine.train_step(slides, LABELS) for _ in range(2)]
        other = made()
        other.random.seed = 5
        assert other.load(tmp_path / "saved") == {"seen": 2}
        again = [other.train_step(slides, LABELS) for _ in range(2)]
        return first, on, again, engine.gather_state_dict(), other.gather_state_dict()

    first, on, again, state, resumed = run_ranks(2, body)[0]
    assert on == again and first != on
    assert all(torch.equal(state[name], resumed[name]) for name in state)


def test_predictions_use_all_tiles_and_give_attention() -> None:
    slides = bags(SIZES)

    def body(comm: Any) -> Any:
        encoder, aggregator = SmallViT().double(), Attention().double()
        engine = hyfi_core.parallelize_tiles(encoder, aggregator, Plan(tiles=2), comm, output=token, chunk=3)
        found = engine.predict(slides)
        assert encoder.training
        return (*found, engine.traffic())

    logits, attention, traffic = run_ranks(2, body)[0]
    assert logits.shape == (3, 3) and [len(of) for of in attention] == list(SIZES)
    assert float(attention[2].sum()) == pytest.approx(1.0)
    assert traffic["stage"]["messages"] == 2  # slide 1 has its only tile on the other rank
