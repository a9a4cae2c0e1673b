"""The watch of a model's state returns what ``module_state`` does, and the same object while nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.capture.module_state import module_state
from hyfi_core.capture.state_watch import StateWatch
from tests.hyfi_core.capture.test_module_state import CHANGES, StatefulNet
from tests.hyfi_core.capture.test_outside_names import CHANGES as OUTSIDE_CHANGES
from tests.hyfi_core.capture.test_outside_names import FACTOR, Outside

pytestmark = pytest.mark.captures_each

MORE: dict[str, Callable[[Any], Any]] = {
    "added": lambda net: setattr(net, "new", 1),
    "removed": lambda net: delattr(net, "scale"),
    "one removed, one added": lambda net: (delattr(net, "weights"), setattr(net, "others", [1.0])),
    "empty list filled": lambda net: net.empty.append(1),
    "list in a tuple": lambda net: net.nested[1].append(1),
    "another name": lambda net: net.__dict__.__setitem__("renamed", net.__dict__.pop("last")),
    "equal number of another type": lambda net: setattr(net, "scale", True),
    "buffer added": lambda net: net.register_buffer("mask", torch.ones(1)),
    "buffer given": lambda net: setattr(net, "later", torch.ones(1)),
    "parameter added": lambda net: setattr(net.head, "more", nn.Parameter(torch.ones(1))),
    "bias removed": lambda net: setattr(net.head, "bias", None),
    "bias frozen": lambda net: net.head.bias.requires_grad_(False),
    "module appended": lambda net: net.blocks.append(nn.ReLU()),
    "module renamed": lambda net: net.__dict__["_modules"].__setitem__("again", net._modules.pop("act")),
    "class replaced": lambda net: setattr(net.act, "__class__", nn.Identity),
    "method replaced": lambda net: setattr(net, "forward", net.first.forward),
}


class Watched(StatefulNet):
    def __init__(self) -> None:
        super().__init__()
        self.empty: list[int] = []
        self.nested: tuple[int, list[int]] = (1, [])
        self.blocks = nn.Sequential(nn.ReLU())
        self.register_buffer("later", None)
        self.last = 3


@pytest.mark.parametrize("change", [*CHANGES.values(), *MORE.values()], ids=[*CHANGES, *MORE])
def test_every_change_is_seen(change: Callable[[Any], Any]) -> None:
    net = Watched()
    watch = StateWatch(net)
    before = watch.state()
    assert watch.state() is before and before == module_state(net)
    change(net)
    after = watch.state()
    assert after != before and after == module_state(net)
    assert watch.state() is after


@pytest.mark.parametrize("name", OUTSIDE_CHANGES)
def test_every_change_outside_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(Outside(FACTOR))
    watch = StateWatch(net)
    before = watch.state()
    assert watch.state() is before
    OUTSIDE_CHANGES[name](monkeypatch)
    assert watch.state() != before and watch.state() == module_state(net)


def test_another_name_and_a_new_property_of_a_class_are_seen_if_a_forward_reads_them() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    gain = 2.0
    Scaled.gain = gain
    net = Scaled()
    watch = StateWatch(net)
    states = [watch.state()]
    del Scaled.gain
    Scaled.factor = gain  # the same object at the same place
    states.append(watch.state())
    Scaled.gain = property(lambda self: self.factor)
    states.append(watch.state())
    assert len({*states}) == 3 and states[2] == module_state(net)
    Scaled.unread = lambda self: UNREAD
    assert watch.state() == states[2]
    Scaled.forward = lambda self, x: getattr(self, "un" + "read")() * x  # it may read all
    states.append(watch.state())
    Scaled.written = 3.0
    assert len({*states, watch.state()}) == 5


UNREAD = 1.0


def test_values_of_tensors_do_not_count() -> None:
    net = Watched()
    watch = StateWatch(net)
    before = watch.state()
    net.head.weight.data.zero_()
    net.norm.running_mean.add_(1)
    assert watch.state() is before
