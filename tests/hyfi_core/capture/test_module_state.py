"""Two captures are alike only where a forward finds the same Python state; what cannot be followed is refused."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.module_state import module_state
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from tests.harness import run_copies

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 12, 10)


class Slots:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


def nested(depth: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(sign=1.0, inner=nested(depth - 1) if depth else None)


def innermost(config: types.SimpleNamespace) -> types.SimpleNamespace:
    return config if config.inner is None else innermost(config.inner)


class StatefulNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(4, 2)
        self.scale, self.weights = 1.0, [1.0, 2.0]
        self.config, self.table = types.SimpleNamespace(power=1, inner=types.SimpleNamespace(sign=1.0)), torch.ones(4)
        self.slots, self.deep, self.long = Slots(), nested(7), [1.0] * 5000
        self.array, self.call = np.ones(5000), functools.partial(torch.clamp, max=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.act(self.norm(self.first(x)))) * self.scale * self.weights[1]
        y = (y * self.config.inner.sign * self.table[None, :, None, None]) ** self.config.power
        y = y * self.slots.gain * innermost(self.deep).sign * self.long[-1] * float(self.array[-1])
        return self.head(self.call(y).mean((2, 3)))


def hook(module: nn.Module, given: Any, answer: torch.Tensor) -> torch.Tensor:
    return answer * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda net: setattr(net.norm, "momentum", 0.7),
    "number": lambda net: setattr(net, "scale", 3.0),
    "list": lambda net: net.weights.__setitem__(1, 5.0),
    "object": lambda net: setattr(net.config, "power", 2),
    "object in an object": lambda net: setattr(net.config.inner, "sign", -1.0),
    "tensor in place": lambda net: net.table.mul_(3),
    "module": lambda net: setattr(net, "act", nn.Tanh()),
    "hook": lambda net: net.first.register_forward_hook(hook),
    "mode": lambda net: net.norm.eval(),
    "slot": lambda net: setattr(net.slots, "gain", 2.0),
    "object nested deeply": lambda net: setattr(innermost(net.deep), "sign", -1.0),
    "item of a long list": lambda net: net.long.__setitem__(-1, 2.0),
    "item of a long array": lambda net: net.array.__setitem__(-1, 2.0),
    "partial": lambda net: net.call.keywords.update(max=0.7),
    "frozen": lambda net: net.first.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts(change: str) -> None:
    net, reference = StatefulNet().double(), StatefulNet().double()
    net.table, reference.table = net.table.double(), reference.table.double()
    engine = hyfi_core.parallelize(net, SHAPE, hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator(), verify=False)
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    for step in range(2):
        if step:
            CHANGES[change](net)
            CHANGES[change](reference)
        loss = engine.accumulate(images, labels)
        expected = F.cross_entropy(reference(images), labels)
        expected.backward()
        assert abs(loss - expected.item()) < 1e-12
    for name, parameter in reference.named_parameters():
        found = dict(net.named_parameters())[name].grad
        assert found is not None and torch.allclose(found, parameter.grad, rtol=1e-10, atol=1e-12), name
    assert all(torch.allclose(v, reference.state_dict()[n]) for n, v in net.state_dict().items())


def test_dropout_that_begins_later_drops() -> None:
    net = StatefulNet()
    engine = hyfi_core.parallelize(net, SHAPE, hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator(), verify=False)
    images, labels = torch.randn(SHAPE), torch.tensor([0, 1])
    assert engine.accumulate(images, labels) == engine.accumulate(images, labels)
    net.drop.p = 0.5
    assert engine.accumulate(images, labels) != engine.accumulate(images, labels)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: setattr(net, "head", nn.Linear(4, 2)), "parameter 'head.weight' of the model was replaced"),
        (lambda net: setattr(net.norm, "running_mean", torch.zeros(4)), "buffer 'norm.running_mean'.* was replaced"),
        (lambda net: setattr(net, "more", nn.Linear(1, 1)), "parameter 'more.weight' of the model was added"),
    ],
)
def test_other_weights_are_refused_at_the_step(change: Callable[[Any], Any], words: str) -> None:
    def body(comm: Any, net: nn.Module) -> None:
        engine = hyfi_core.parallelize(net, SHAPE, hyfi_core.ParallelPlan(((1, 2),)), comm)
        change(net)
        with pytest.raises(RequestError, match=words):
            engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))

    run_copies(StatefulNet(), 2, body)


def test_states_are_equal_while_nothing_changes() -> None:
    net = StatefulNet()
    net.itself, net.limit = net.config, float("nan")
    net.config.owner = net.config  # holds itself
    before = module_state(net)
    net.head.weight.data.zero_()
    net.norm.running_mean.add_(1)
    assert module_state(net) == before and hash(module_state(net)) == hash(before)
    net.scale = True  # equal to 1.0, and another type
    assert module_state(net) != before


def test_another_key_of_a_large_dict_is_a_change() -> None:
    net = StatefulNet()
    net.places = {f"key {number}": number for number in range(5_000)}
    before = module_state(net)
    assert module_state(net) == before
    keys = list(net.places)
    net.places = {("other" if key == keys[7] else key): value for key, value in net.places.items()}
    assert module_state(net) != before
