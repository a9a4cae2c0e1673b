"""What a forward reads outside of its module counts between steps, as its attributes do."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyfi_core.capture.module_state import OUTSIDE, changed_since, describe_value, module_state
from tests.hyfi_core.capture.test_module_state import StatefulNet

pytestmark = pytest.mark.captures_each

NUMBER = 1.0
UNREAD = 1.0
TABLE = {"gain": [1.0]}
SETTINGS = types.SimpleNamespace(scale=1.0, gain=1.0)


activation = torch.relu
BIASES = [0.0]


class Shift:
    gain = 1.0

    def __init__(self) -> None:
        self.by = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.by

    @staticmethod
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * Twice.factor


class Twice(Shift):
    factor = 2.0


SHIFT = Shift()


@functools.lru_cache
def cached() -> float:
    return float(UNCACHED)


UNCACHED = 1.0


def with_default(x: torch.Tensor, biases: list[float] = BIASES) -> torch.Tensor:
    return x + biases[0]


def multiplied(x: torch.Tensor, by: dict[str, float]) -> torch.Tensor:
    return x * by["number"]


PARTIAL = functools.partial(multiplied, by={"number": 1.0})


def helped(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS.scale


def coded(x: torch.Tensor) -> torch.Tensor:
    return x.to(DTYPE) * LIMIT


DTYPE, LIMIT = torch.float32, torch.ones(1)


class Outside(nn.Module):
    power = 1
    held = types.SimpleNamespace(scale=1.0)
    shift = Shift()
    limit = torch.ones(1)
    dtype = torch.float32
    part = functools.partial(multiplied, by={"number": 1.0})
    unit: nn.Module = nn.ReLU()

    class Inner:
        scale = 1.0

    def __init__(self, factor: list[float]) -> None:
        super().__init__()
        self.UNREAD = 2.0
        self.last = lambda x: x * factor[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(self.unit(x.to(self.dtype) * self.Inner.scale + self.shift.by * self.held.scale * self.limit))
        x = with_default(PARTIAL(Twice.doubled(SHIFT(activation(x))))) * cached() * float(os.environ.get("SCALE", 1))
        return self.last(helped(coded(x)) ** self.power * NUMBER * TABLE["gain"][0]) * self.UNREAD


FACTOR = [1.0]
CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "NUMBER": lambda patch: patch.setitem(globals(), "NUMBER", 2.0),
    "TABLE": lambda patch: patch.setitem(TABLE, "gain", [2.0]),
    "SETTINGS.scale": lambda patch: patch.setattr(SETTINGS, "scale", 2.0),
    "Outside.power": lambda patch: patch.setattr(Outside, "power", 2),
    "factor": lambda patch: FACTOR.__setitem__(0, FACTOR[0] + 1),
    "activation": lambda patch: patch.setitem(globals(), "activation", torch.tanh),
    "SHIFT": lambda patch: patch.setattr(SHIFT, "by", 1.0),
    "Shift.gain": lambda patch: patch.setattr(Shift, "gain", 2.0),
    "Twice.factor": lambda patch: patch.setattr(Twice, "factor", 3.0),
    "UNCACHED": lambda patch: patch.setitem(globals(), "UNCACHED", 2.0),
    "with_default()": lambda patch: BIASES.__setitem__(0, BIASES[0] + 1),
    "PARTIAL": lambda patch: patch.setitem(PARTIAL.keywords["by"], "number", 2.0),
    "Outside.forward": lambda patch: patch.setattr(Outside, "forward", lambda module, x: x),
    "os.environ": lambda patch: patch.setenv("SCALE", "2"),
    "DTYPE": lambda patch: patch.setitem(globals(), "DTYPE", torch.float64),
    "LIMIT": lambda patch: patch.setitem(globals(), "LIMIT", torch.ones(1)),
    "coded": lambda patch: patch.setattr(coded, "__code__", helped.__code__),
    "Outside.held": lambda patch: patch.setattr(Outside.held, "scale", 2.0),
    "Outside.shift": lambda patch: patch.setattr(Outside.shift, "by", 2.0),
    "Outside.limit": lambda patch: patch.setattr(Outside, "limit", torch.ones(1)),
    "Outside.dtype": lambda patch: patch.setattr(Outside, "dtype", torch.float64),
    "Outside.part": lambda patch: patch.setitem(Outside.part.keywords["by"], "number", 2.0),
    "Outside.unit": lambda patch: patch.setattr(Outside, "unit", nn.Tanh()),
    "Inner.scale": lambda patch: patch.setattr(Outside.Inner, "scale", 2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_functions_read_outside_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Outside(FACTOR))
    before = module_state(model)
    assert module_state(model) == before and hash(module_state(model)) == hash(before)
    CHANGES[name](monkeypatch)
    ((path, what),) = changed_since(before, module_state(model))
    assert path == OUTSIDE and what.endswith(name)
    assert describe_value(model, path, what) != "not there"


class OnlyAValue(Outside):
    power = 1


def test_an_attribute_of_a_class_without_methods_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = OnlyAValue(FACTOR)
    before = module_state(model)
    monkeypatch.setattr(OnlyAValue, "power", 2)
    assert module_state(model) != before


def test_the_environment_counts_if_read_by_getenv(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Module()
    model.scale = lambda x: x * float(os.getenv("SCALE", "1"))
    before = module_state(model)
    monkeypatch.setenv("SCALE", "2")
    assert module_state(model) != before


def test_functions_of_one_factory_are_told_apart() -> None:
    def scaled(factors: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * factors[0]

    first, second = [1.0], [2.0]
    model = nn.Module()
    model.functions = [scaled(first), scaled(second)]
    for factors in (first, second):
        before = module_state(model)
        factors[0] += 1
        assert module_state(model) != before


def test_what_a_trace_replaces_in_pytorch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StatefulNet()  # its __init__ calls torch.manual_seed
    before = module_state(model)
    monkeypatch.setattr(torch, "manual_seed", torch.seed)
    assert module_state(model) == before


def test_names_that_only_attributes_have_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Outside(FACTOR)
    before = module_state(model)
    monkeypatch.setitem(globals(), "UNREAD", 7.0)
    monkeypatch.setattr(SETTINGS, "gain", 7.0)
    assert module_state(model) == before


def test_an_attribute_of_a_module_that_is_not_registered_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Outside(FACTOR))
    before = module_state(model)
    monkeypatch.setattr(Outside.unit, "inplace", True)
    ((path, what),) = changed_since(before, module_state(model))
    assert path == OUTSIDE and what.endswith("Outside.unit")


def test_a_variable_around_a_function_in_an_object_counts() -> None:
    number = 1.0

    def times(x: torch.Tensor) -> torch.Tensor:
        return x * number

    model = Outside(FACTOR)
    model.settings = types.SimpleNamespace(function=times)
    before = module_state(model)
    number = 2.0
    assert changed_since(before, module_state(model)) == [("", "settings")]
