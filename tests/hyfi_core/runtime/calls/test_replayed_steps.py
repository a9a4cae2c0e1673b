"""Steps that repeat graphs equal steps that run as they are, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.models.resnet import resnet6
from hyfi_core.runtime.engine import Engine
from tests.fake_graph import FakeGraph, fake_graphs

SIDE = 40
PLANS = {
    "one rank": {},
    "pieces": {"interleave": 3, "recompute": True},
    "micro-batches": {"microbatches": 2},
    "cells": {"cells": (2, 2)},
    "cells and pieces": {"cells": (2, 1), "interleave": 2, "recompute": True},
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return resnet6(3, norm="train", width=8).double().train()


def engine_of(model: nn.Module, plan: dict[str, Any], **more: Any) -> Engine:
    return hyfi_core.parallelize(
        model,
        (2, 3, SIDE, SIDE),
        hyfi_core.ParallelPlan(grids=((1, 1),), **plan),
        AloneCommunicator(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        verify=False,
        **more,
    )


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64, generator=generator),
            torch.tensor([step % 3, (step + 1) % 3]),
        )
        for step in range(count)
    ]


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for (name, a), (_, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def assert_same_losses(expected: Engine, engine: Engine, given: list[Any]) -> list[FakeGraph]:
    """Take the steps of both engines; return the graphs that the second one has recorded."""
    losses = [expected.train_step(*batch) for batch in given]
    with fake_graphs(engine) as graphs:
        assert [engine.train_step(*batch) for batch in given] == losses
    return graphs


@pytest.mark.parametrize("name", PLANS)
def test_repeated_steps_are_the_same(name: str) -> None:
    plain, recorded = model_of(), model_of()
    expected, engine = engine_of(plain, PLANS[name]), engine_of(recorded, PLANS[name])
    graphs = assert_same_losses(expected, engine, batches(7))
    assert graphs and all(graph.replays == 5 for graph in graphs)
    assert_equal(plain, recorded)
    assert engine.traffic() == expected.traffic()


def test_losses_may_differ_from_step_to_step() -> None:
    """What the loss does on the host counts in every step: it is not part of the graphs."""

    class Annealed:
        steps = 0

        def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return F.cross_entropy(output, labels, label_smoothing=0.1 * self.steps) / self.steps

    plain, recorded = model_of(), model_of()
    expected, engine = engine_of(plain, {}, loss=Annealed()), engine_of(recorded, {}, loss=Annealed())
    graphs = assert_same_losses(expected, engine, batches(6))
    assert graphs
    assert_equal(plain, recorded)


def test_losses_may_keep_what_they_are_given() -> None:
    """Outputs of earlier steps stay as they are, such as those from which a metric is computed after an epoch."""

    class Keeping:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

        def __call__(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.kept.append(output)
            return F.cross_entropy(output, labels)

    plain, recorded = Keeping(), Keeping()
    expected = engine_of(model_of(), {}, loss=plain, loss_over="microbatch")
    engine = engine_of(model_of(), {}, loss=recorded, loss_over="microbatch")
    for batch in batches(6):
        expected.train_step(*batch)
    with fake_graphs(engine) as graphs:
        for batch in batches(6):
            engine.train_step(*batch)
    assert graphs and len(plain.kept) == 6
    for a, b in zip(plain.kept, recorded.kept, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)


class Twice(nn.Module):
    """Returns its logits twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(F.relu(self.norm(self.conv(images))).mean((2, 3)))
        return logits, logits


def test_an_output_that_is_returned_twice_has_the_gradients_of_both() -> None:
    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs[0], labels) + outputs[1].square().mean()

    plain, recorded = Twice().double().train(), Twice().double().train()
    expected, engine = (engine_of(model, {}, loss=loss, loss_over="microbatch") for model in (plain, recorded))
    graphs = assert_same_losses(expected, engine, batches(6))
    assert graphs
    assert_equal(plain, recorded)


def test_gradients_accumulate_and_are_clipped() -> None:
    plain, recorded = model_of(), model_of()
    expected, engine = engine_of(plain, {}), engine_of(recorded, {})

    def steps(of: Engine) -> list[Any]:
        results: list[Any] = []
        for number, batch in enumerate(batches(9)):
            results.append(of.accumulate(*batch))
            if number % 3 == 2:
                results.append(of.update(max_norm=0.5))
        return results

    results = steps(expected)
    with fake_graphs(engine) as graphs:
        assert steps(engine) == results
    assert graphs[0].replays == 7
    assert_equal(plain, recorded)


def test_images_that_are_read_in_part() -> None:
    """Each step reads its own pixels, also where a function is asked for boxes of them."""
    plain, recorded = model_of(), model_of()
    plan = {"cells": (2, 2)}
    expected, engine = engine_of(plain, plan), engine_of(recorded, plan)
    given = [
        (lambda box, images=images: images[:, :, box.y0 : box.y1, box.x0 : box.x1], labels)
        for images, labels in batches(6)
    ]
    graphs = assert_same_losses(expected, engine, given)
    assert graphs
    assert_equal(plain, recorded)


def recorded_steps(engine: Engine, call: Callable[[int], None], steps: int = 8) -> list[int]:
    """Return how many graphs exist after each step; ``call`` is called before it."""
    counts = []
    with fake_graphs(engine) as graphs:
        for number, batch in enumerate(batches(steps)):
            call(number)
            engine.train_step(*batch)
            counts.append(len(graphs))
    return counts


def test_predictions_free_the_memory() -> None:
    """Validation has the memory of a step; afterwards, two steps run as they are, and the next is recorded again."""
    engine = engine_of(model_of(), {})
    counts = recorded_steps(engine, lambda step: engine.predict(batches(1)[0][0]) if step == 4 else None)
    assert counts[:3] == [0, 0, counts[2]] and counts[5] == counts[2] and counts[6] == 2 * counts[2] == counts[7]


CHANGES = ["weights", "memory", "format", "frozen", "smaller batch", "autocast", "anomaly", "tf32 of convolutions"]


@pytest.fixture
def precision() -> Iterator[None]:
    """Settings of torch are afterwards as before."""
    convolution = getattr(torch.backends.cudnn, "conv", None)
    before = None if convolution is None else convolution.fp32_precision
    yield
    if convolution is not None:
        convolution.fp32_precision = before


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_recorded_again(change: str) -> None:
    """Loaded weights keep their memory, so that graphs read them; anything else makes a step another one."""
    plain, recorded = model_of(), model_of()

    def run(model: nn.Module, of: Engine) -> list[float]:
        losses = []
        for number, (images, labels) in enumerate(batches(8)):
            if number == 5 and change == "weights":
                of.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            if number == 5 and change == "memory":
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            if number == 5 and change == "format":  # in the same memory
                weight = model.fc.weight  # type: ignore[union-attr]
                weight.data = weight.data.copy_(weight.t().contiguous().view_as(weight)).view(weight.shape[::-1]).t()
            if change == "tf32 of convolutions":
                if not hasattr(torch.backends.cudnn, "conv"):
                    pytest.skip("before torch 2.9, convolutions have no setting of their own")
                torch.backends.cudnn.conv.fp32_precision = "ieee" if number >= 5 else "tf32"
            if number == 5 and change == "frozen":
                model.conv1.weight.requires_grad_(False)  # type: ignore[union-attr]
            if number == 5 and change == "smaller batch":
                images, labels = images[:1], labels[:1]
            now = change if number == 5 else ""
            anomalies = torch.autograd.set_detect_anomaly(now == "anomaly")  # type: ignore[no-untyped-call]
            with torch.autocast("cpu", torch.bfloat16, enabled=now == "autocast"), anomalies:
                losses.append(of.train_step(images, labels))
        return losses

    # A caller may set autocast around an engine that has its own.
    settings: dict[str, Any] = {"autocast": torch.bfloat16} if change == "autocast" else {}
    losses = run(plain, engine_of(plain, {}, **settings))
    engine = engine_of(recorded, {}, **settings)
    with fake_graphs(engine) as graphs:
        assert run(recorded, engine) == losses
    assert max(graph.replays for graph in graphs) == (6 if change == "weights" else 3)
    assert_equal(plain, recorded)


class Dropping(nn.Module):
    """A network that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = F.dropout(F.relu(self.conv(images)), 0.5, self.training)
        return self.head(maps.mean((2, 3)))  # type: ignore[no-any-return]


def test_random_numbers_are_drawn_anew() -> None:
    model = Dropping().double().train()
    assert recorded_steps(engine_of(model, {}), lambda step: None, 4) == [0, 0, 0, 0]


def test_losses_that_use_parameters_run_as_they_are() -> None:
    """Their own gradients of parameters are not in the graphs."""
    plain, recorded = model_of(), model_of()

    def regularised(model: nn.Module) -> Any:
        weight = model.fc.weight  # type: ignore[union-attr]
        return lambda output, labels: F.cross_entropy(output, labels) + weight.square().sum()

    expected, engine = (
        engine_of(plain, {}, loss=regularised(plain)),
        engine_of(recorded, {}, loss=regularised(recorded)),
    )
    losses = [expected.train_step(*batch) for batch in batches(5)]
    with fake_graphs(engine), pytest.warns(UserWarning, match="the loss uses parameters of the model by itself"):
        assert [engine.train_step(*batch) for batch in batches(5)] == losses
    assert_equal(plain, recorded)


def test_losses_that_begin_to_use_parameters() -> None:
    plain, recorded = model_of(), model_of()

    def late(model: nn.Module) -> Any:
        calls = []

        def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            penalty = model.fc.weight.square().sum() if len(calls) > 4 else 0.0  # type: ignore[union-attr]
            return F.cross_entropy(output, labels) + penalty

        return loss

    expected, engine = engine_of(plain, {}, loss=late(plain)), engine_of(recorded, {}, loss=late(recorded))
    losses = [expected.train_step(*batch) for batch in batches(7)]
    with fake_graphs(engine) as graphs:
        assert [engine.train_step(*batch) for batch in batches(7)] == pytest.approx(losses, rel=1e-12)
    assert graphs
    for a, b in zip(plain.parameters(), recorded.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_steps_that_cannot_be_recorded_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for the device, or does not fit beside: buffers and losses of the failed attempt do not count."""
    from tests import fake_graph

    plain, recorded = model_of(), model_of()
    expected, engine = engine_of(plain, PLANS["cells"]), engine_of(recorded, PLANS["cells"])
    losses = [expected.train_step(*batch) for batch in batches(3)]
    end, ended = fake_graph.FakeGraph.end, []

    def failing(self: fake_graph.FakeGraph) -> None:
        end(self)
        ended.append(self)
        if len(ended) == 2:  # in the middle: the first graph has run
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(fake_graph.FakeGraph, "end", failing)
    with fake_graphs(engine), pytest.warns(UserWarning, match="steps are not recorded as CUDA graphs: RuntimeError"):
        assert [engine.train_step(*batch) for batch in batches(3)] == losses
        assert engine.traffic() == expected.traffic()
        assert [engine.train_step(*batch) for batch in batches(3)] == [
            expected.train_step(*batch) for batch in batches(3)
        ]
    assert len(ended) == 2
    assert_equal(plain, recorded)


def test_a_failed_attempt_leaves_gradients_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may keep something at a frozen parameter; see ``test_steps_that_cannot_be_recorded…``."""
    from tests import fake_graph

    model = model_of()
    frozen = model.get_parameter("bn1.bias").requires_grad_(False)
    engine = engine_of(model, {})
    end = fake_graph.FakeGraph.end

    def failing(self: fake_graph.FakeGraph) -> None:
        end(self)
        raise ZeroDivisionError

    monkeypatch.setattr(fake_graph.FakeGraph, "end", failing)
    with fake_graphs(engine), pytest.warns(UserWarning, match="ZeroDivisionError"):
        for batch in batches(3):
            frozen.grad = kept = torch.ones_like(frozen)
            engine.accumulate(*batch)
            assert frozen.grad is kept


def test_errors_of_the_loss_are_its_own() -> None:
    calls = []

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("no label 7")
        return F.cross_entropy(output, labels)

    engine = engine_of(model_of(), {}, loss=loss)
    with fake_graphs(engine):
        for batch in batches(2):
            engine.train_step(*batch)
        with pytest.raises(ValueError, match="no label 7"):
            engine.train_step(*batches(1)[0])


def test_the_users_hooks_run_in_every_step() -> None:
    plain, recorded = model_of(), model_of()
    for model in (plain, recorded):
        model.fc.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[union-attr]
    expected, engine = engine_of(plain, {}), engine_of(recorded, {})
    graphs = assert_same_losses(expected, engine, batches(6))
    assert graphs
    assert_equal(plain, recorded)


def test_steps_whose_times_are_asked_for_run_as_they_are() -> None:
    engine = engine_of(model_of(), {})
    seen = []

    def traced(step: int) -> None:
        seen.append(bool(engine.events))
        if step in (4, 6):
            engine.record_spans([] if step == 4 else None)

    recorded_steps(engine, traced)
    # Before the first step, and after: the fourth repeats the third, the fifth and sixth are traced.
    assert seen == [False, True, True, True, False, True, True, True]


def test_off() -> None:
    engine = engine_of(copy.deepcopy(model_of()), {}, cuda_graphs="off")
    assert not engine._replayed._may_record
    with pytest.raises(hyfi_core.RequestError, match="cuda_graphs is 'on'; pass 'auto' or 'off'"):
        engine_of(model_of(), {}, cuda_graphs="on")
