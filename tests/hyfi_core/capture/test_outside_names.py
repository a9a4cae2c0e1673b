"""What a forward reads outside of its module counts between steps, as its attributes do."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyfi_core.capture.module_state import OUTSIDE, changed_since, describe_value, module_state

pytestmark = pytest.mark.captures_each

NUMBER = 1.0
UNREAD = 1.0
TABLE = {"gain": [1.0]}
SETTINGS = types.SimpleNamespace(scale=1.0, gain=1.0)


def helped(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS.scale


class Outside(nn.Module):
    power = 1

    def __init__(self, factor: list[float]) -> None:
        super().__init__()
        self.UNREAD = 2.0
        self.last = lambda x: x * factor[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(helped(x) ** self.power * NUMBER * TABLE["gain"][0]) * self.UNREAD


FACTOR = [1.0]
CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "NUMBER": lambda patch: patch.setitem(globals(), "NUMBER", 2.0),
    "TABLE": lambda patch: patch.setitem(TABLE, "gain", [2.0]),
    "SETTINGS.scale": lambda patch: patch.setattr(SETTINGS, "scale", 2.0),
    "Outside.power": lambda patch: patch.setattr(Outside, "power", 2),
    "factor": lambda patch: FACTOR.__setitem__(0, FACTOR[0] + 1),
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


def test_names_that_only_attributes_have_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Outside(FACTOR)
    before = module_state(model)
    monkeypatch.setitem(globals(), "UNREAD", 7.0)
    monkeypatch.setattr(SETTINGS, "gain", 7.0)
    assert module_state(model) == before
