"""Ranks that keep only what their stages use: equal to one process, and nothing else is held."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from tests.harness import run_copies
from tests.steps import adamw, assert_equal_steps, make_batches, one_process_steps, parallel_steps, sgd


class Tied(nn.Module):
    """The first and third convolution share their weight, the second is frozen, the last norm is cumulative."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 1)
        self.first = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
        self.fc = nn.Linear(4, 2)
        self.third[0].weight = self.first[0].weight
        self.second[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.third(self.second(self.first(self.enter(x)))).mean((2, 3)))


CUTS = ("enter", "first", "second")
PLANS = {
    "two stages": ParallelPlan(((1, 2), (1, 1)), ("second",), 2, "1f1b"),
    "two replicas": ParallelPlan(((1, 1), (1, 1)), ("first",), 2, "gpipe", 2),
    "four stages": ParallelPlan(((1, 1),) * 4, CUTS, 4, "1f1b"),
    "chimera": ParallelPlan(((1, 1),) * 4, CUTS, 4, "chimera"),
    "gems, cells": ParallelPlan(((1, 1), (1, 1)), ("first",), 2, "gems_master", cells=(1, 2)),
}
SHAPE = (4, 3, 13, 10)


@pytest.mark.parametrize("name", PLANS)
def test_released_ranks_train_as_one_process(name: str) -> None:
    torch.manual_seed(3)
    model, plan = Tied().double(), PLANS[name]
    batches = make_batches(SHAPE, 4, plan.replicas)
    factory = adamw if name == "chimera" else sgd
    found, _ = parallel_steps(model, batches, plan, factory, strict=False, release=True)
    assert_equal_steps(found, one_process_steps(model, batches, plan.microbatches, factory))


def test_two_directions_with_one_owner_train_as_one_process() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1))
    model = model.append(nn.Flatten()).append(nn.Linear(4, 2)).double()
    plan = ParallelPlan(((1, 1),) * 4, ("0", "1", "2"), 4, "gems_mast", mirror="point_to_point")
    batches = make_batches(SHAPE, 4, 1)
    found, _ = parallel_steps(model, batches, plan, sgd, strict=False, release=True)
    assert_equal_steps(found, one_process_steps(model, batches, 4, sgd))


def test_a_rank_holds_the_weights_gradients_and_moments_of_its_stages_only() -> None:
    plan = PLANS["four stages"]
    stages = (("enter.",), ("first.", "third.0."), ("second.",), ("third.", "first.0.", "fc."))
    ((images, labels),) = make_batches(SHAPE, 1, 1)[0]

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, optimizer=adamw, release=True)
        engine.accumulate(images, labels)
        named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
        graded = {name for name, tensor in named.items() if tensor.grad is not None}
        engine.update()
        moments = {name for name, tensor in named.items() if tensor in engine.optimizer.state}
        return {name for name, tensor in named.items() if not tensor.is_meta}, graded, moments

    names = set(dict(Tied().named_parameters(remove_duplicate=False))) | set(dict(Tied().named_buffers()))
    trained = {name for name, p in Tied().named_parameters(remove_duplicate=False) if p.requires_grad}
    for prefixes, (held, graded, moments) in zip(stages, run_copies(Tied().double(), 4, body), strict=True):
        own = {name for name in names if name.startswith(prefixes)}
        assert held == own
        assert graded == moments == own & trained


def test_a_new_capture_on_a_released_rank_is_that_of_the_whole_model() -> None:
    """Other sizes and modes, captured by each rank itself, with the check at start."""
    torch.manual_seed(4)
    model, plan = Tied().double(), ParallelPlan(((1, 1), (1, 1)), ("first",), 2)
    copies, lock = [copy.deepcopy(model) for _ in range(2)], threading.Lock()
    small, large = (make_batches(shape, 1, 1)[0][0] for shape in (SHAPE, (4, 3, 17, 15)))

    def body(comm: Any) -> Any:
        module = copies[comm.rank]
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, optimizer=sgd, release=True)
        losses = [engine.train_step(*small), engine.train_step(*large)]
        module.second.eval()
        losses.append(engine.train_step(*small))
        with lock:
            assert sum(tensor.is_meta for tensor in module.parameters()) > 3
        return losses, engine.predict(large[0]), engine.gather_state_dict()

    losses, logits, state = run_ranks(2, body)[0]
    optimizer = sgd(model.parameters())
    for (images, labels), wanted, evaluates in zip((small, large, small), losses, (False, False, True), strict=True):
        model.second.train(not evaluates)
        parts = [F.cross_entropy(model(i), y) / 2 for i, y in zip(images.chunk(2), labels.chunk(2), strict=True)]
        assert sum(part.item() for part in parts) == pytest.approx(wanted, abs=1e-10)
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(logits, model.eval()(large[0]), rtol=1e-8, atol=1e-10)


def test_a_state_is_loaded_and_gathered_whole() -> None:
    torch.manual_seed(5)
    other = Tied().double().state_dict()

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, PLANS["four stages"], comm, release=True)
        with pytest.raises(RuntimeError, match=r"size mismatch for fc\.weight"):
            engine.load_state_dict(other | {"fc.weight": torch.zeros(3, 4)})
        engine.load_state_dict(other)
        with torch.no_grad():
            for parameter in module.parameters():  # between steps, on every rank alike
                parameter.mul_(2)
        engine.predict(torch.zeros(SHAPE, dtype=torch.float64))
        return engine.gather_state_dict()

    found = run_copies(Tied().double(), 4, body)[0]
    parameters = dict(Tied().named_parameters(remove_duplicate=False))
    assert list(found) == list(other)
    assert all(torch.equal(found[n], value * 2 if n in parameters else value) for n, value in other.items())


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied().double()


@pytest.mark.parametrize("name", ["two replicas", "chimera", "gems, cells"])
@pytest.mark.parametrize("release", [True, False])
def test_a_model_without_values_reads_those_of_its_stages(name: str, release: bool, tmp_path: Path) -> None:
    torch.manual_seed(6)
    model, plan = Tied().double(), PLANS[name]
    state = {name: value for name, value in model.state_dict().items() if name != "third.0.weight"}  # tied: stored once
    save_file(state, tmp_path / "model.safetensors")
    batches, asked = make_batches(SHAPE, 2, plan.replicas), [set[str]() for _ in range(plan.ranks)]

    def body(comm: Any, module: Tied) -> Any:
        def read(wanted: str) -> torch.Tensor:
            asked[comm.rank].add(wanted)
            return state[wanted]

        weights: Any = read if name == "chimera" else tmp_path
        given: Any = {"optimizer": sgd, "verify": False, "release": release, "weights": weights}
        assert module.third[0].weight is module.first[0].weight
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, **given)
        assert module.third[0].weight is module.first[0].weight
        losses = [engine.train_step(*step[comm.rank // plan.ranks_per_replica]) for step in batches]
        return losses, engine.gather_state_dict(), sum(tensor.is_meta for tensor in module.parameters())

    results = run_copies(on_meta(), plan.ranks, body)
    wanted = one_process_steps(model, batches, plan.microbatches, sgd)
    for loss, other in zip(results[0][0], wanted.losses, strict=True):
        assert loss == pytest.approx(other, abs=1e-10)
    for key, value in wanted.state.items():
        torch.testing.assert_close(results[0][1][key], value, rtol=1e-9, atol=1e-10)
    assert (sum(result[2] for result in results) > 0) == (release and name != "gems, cells")  # its ranks hold both
    if name == "chimera":
        assert set.union(*asked) == set(state)
        counts = sum(map(len, asked))
        assert counts == len(state)  # each is read once


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"'enter\.weight' of the model is on the meta device and has no data"),
        ({"weights": {}, "verify": True}, "rank 0 cannot compare the model with its capture"),
        ({"weights": 3}, "weights is a int; pass a safetensors file"),
        ({"weights": "missing.safetensors"}, "missing.safetensors is neither a safetensors file"),
        ({"weights": {"enter.weight": torch.zeros(4, 3, 1, 1)}}, r"has no tensor 'enter\.bias'"),
        ({"weights": lambda name: torch.zeros(7)}, r"weights: 'enter\.weight' is \(7,\), but that of the model has"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    plan = ParallelPlan(((1, 1), (1, 1)), ("first",))
    settings: Any = {"verify": False, "release": True, **given}
    refused(on_meta(), words, lambda comm, module: hyfi_core.parallelize(module, SHAPE, plan, comm, **settings))


def test_weights_for_a_model_that_has_values_are_refused() -> None:
    def body(comm: Any, module: nn.Module) -> None:
        hyfi_core.parallelize(module, SHAPE, ParallelPlan(((1, 2),)), comm, weights=module.state_dict())

    refused(Tied(), "weights are given, but the model is not on the meta device", body)


def test_a_module_that_ranks_share_is_refused() -> None:
    model = Tied()
    with pytest.raises(RequestError, match="several ranks share one module"):
        run_ranks(
            2,
            lambda comm: hyfi_core.parallelize(
                model, SHAPE, ParallelPlan(((1, 1), (1, 1)), ("first",)), comm, verify=False, release=True
            ),
        )


def refused(model: nn.Module, words: str, body: Any) -> None:
    with pytest.raises(RequestError, match=words):
        run_copies(model, 2, body)


def test_a_loss_that_reads_a_released_weight_is_refused() -> None:
    """Also where code outside of the model still holds the old tensor, whose values no step changes any more."""

    def body(comm: Any, module: nn.Module) -> None:
        before = module.enter.weight
        loss = lambda logits, labels: F.cross_entropy(logits, labels) + before.square().sum()  # noqa: E731
        plan = ParallelPlan(((1, 1), (1, 1)), ("first",))
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, loss=loss, release=True)
        engine.accumulate(*make_batches(SHAPE, 1, 1)[0][0])

    refused(Tied().double(), r"the loss reads 'enter\.weight' of the model", body)


class OtherHead(nn.Module):
    """In evaluation mode the first layer's weight is used at the end, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.leave(self.enter(x))
        return (y if self.training else F.conv2d(y, self.enter.weight)).mean((2, 3))


def test_a_mode_that_needs_a_released_weight_is_refused_on_all_ranks() -> None:
    def body(comm: Any, module: nn.Module) -> None:
        engine = hyfi_core.parallelize(module, SHAPE, ParallelPlan(((1, 1), (1, 1)), ("enter",)), comm, release=True)
        with pytest.raises(RequestError, match=r"'enter\.weight' of the model is now used in stage 1"):
            engine.predict(torch.zeros(SHAPE, dtype=torch.float64))
        raise RequestError("on this rank, too")

    refused(OtherHead().double(), "on this rank, too", body)


def test_released_tensors_are_named_by_errors() -> None:
    def body(comm: Any, module: nn.Module) -> None:
        plan = ParallelPlan(((1, 1), (1, 1)), ("first",))
        hyfi_core.parallelize(module, SHAPE, plan, comm, release=True)
        with pytest.raises(RequestError, match="a released tensor of the model"):
            module(torch.zeros(SHAPE, dtype=torch.float64))
        hyfi_core.parallelize(module, SHAPE, plan, comm)

    refused(Tied().double(), r"on the meta device .* was released by an earlier parallelize", body)


def test_the_layers_of_a_recurrent_module_are_released() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rows, self.fc = nn.Conv2d(3, 4, 1), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.rows(self.conv(x).mean(3).transpose(1, 2))[0].mean(1))

    model = Recurrent().double()
    images, labels = make_batches(SHAPE, 1, 1)[0][0]

    def body(comm: Any, module: Any) -> Any:
        plan = ParallelPlan(((1, 1), (1, 1)), ("conv",))
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, release=True)
        return engine.accumulate(images, labels), all(weight.is_meta for weight in module.rows._flat_weights)

    (loss, freed), (_, kept) = run_copies(model, 2, body)
    assert loss == pytest.approx(F.cross_entropy(model(images), labels).item(), abs=1e-12)
    assert freed and not kept


@pytest.mark.parametrize("used", ["convolution", "average", "state"])
def test_a_released_tensor_is_not_computed_with(used: str) -> None:
    """PyTorch's convolution with it returns memory that was never written, and an addition in place does nothing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def body(comm: Any, module: Any) -> None:
        plan = ParallelPlan(((1, 1), (1, 1)), ("0",))
        hyfi_core.parallelize(module, SHAPE, plan, comm, release=True)
        weight = module[1 - comm.rank].weight
        module.register_buffer("mask", weight.detach())
        assert (
            weight.is_meta and isinstance(weight, nn.Parameter) and copy.deepcopy(module)[1 - comm.rank].weight.is_meta
        )
        with torch.no_grad():
            weight.mul_(2).add_(torch.ones_like(weight, device="cpu"))  # between steps, on every rank alike
            if used == "convolution":
                module(torch.zeros(SHAPE))
            average = torch.zeros(weight.shape)
            average.add_(module.state_dict()[f"{1 - comm.rank}.weight"] if used == "state" else weight)

    refused(model, "called with values and a released tensor", body)


@pytest.mark.parametrize("release", [True, False])
def test_the_versions_of_modules_are_loaded_with_a_state(release: bool) -> None:
    """Without them a batch norm takes a state for an old one, which may lack its counter."""
    state = Tied().double().state_dict()
    del state["first.1.num_batches_tracked"]

    def body(comm: Any, module: nn.Module) -> None:
        engine = hyfi_core.parallelize(module, SHAPE, PLANS["four stages"], comm, release=release)
        with pytest.raises(RuntimeError, match="Missing key"):
            engine.load_state_dict(state)

    run_copies(Tied().double(), 4, body)
