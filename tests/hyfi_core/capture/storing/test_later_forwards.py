"""Flags that a forward stores and a later one reads: refused without a comparison of outputs; others are no change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.module_state import module_state
from hyfi_core.errors import RequestError

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 8, 8)
FLAGS: dict[str, Any] = {}
SEEN: set[str] = set()
FACTOR: float | None = None


class Net(nn.Module):
    """A convolution, something that depends on a flag, and a head."""

    ready_in_class = False

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.middle, self.ready, self.scale, self.kept = middle, False, None, dict[str, Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self, self.conv(x)).mean((2, 3)))


def own_flag(net: Any, x: torch.Tensor) -> torch.Tensor:
    if not net.ready:
        net.ready = True
        return x * 2
    return x


def own_number(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.scale is None:
        net.scale = 2.0
        return x
    return x * net.scale


def own_key(net: Any, x: torch.Tensor) -> torch.Tensor:
    if "ready" not in net.kept:
        net.kept["ready"] = True
        return x * 2
    return x


def global_key(net: Any, x: torch.Tensor) -> torch.Tensor:
    if not FLAGS.get("ready"):
        FLAGS["ready"] = True
        return x * 2
    return x


def global_item(net: Any, x: torch.Tensor) -> torch.Tensor:
    if "ready" not in SEEN:
        SEEN.add("ready")
        return x * 2
    return x


def global_name(net: Any, x: torch.Tensor) -> torch.Tensor:
    global FACTOR
    if FACTOR is None:
        FACTOR = 2.0
        return x
    return x * FACTOR


def of_class(net: Any, x: torch.Tensor) -> torch.Tensor:
    if not Net.ready_in_class:
        Net.ready_in_class = True
        return x * 2
    return x


def in_training_for_evaluation(net: Any, x: torch.Tensor) -> torch.Tensor:
    if net.training:
        net.ready = True
    return x * 2 if net.ready else x


KINDS = [own_flag, own_number, own_key, global_key, global_item, global_name, of_class, in_training_for_evaluation]


@pytest.fixture(autouse=True)
def nothing_stored() -> None:
    global FACTOR
    FLAGS.clear()
    SEEN.clear()
    FACTOR, Net.ready_in_class = None, False


@pytest.mark.parametrize("middle", KINDS, ids=lambda kind: kind.__name__)
def test_a_flag_that_switches_a_later_forward_is_refused(middle: Any) -> None:
    net = Net(middle).double()
    before = module_state(net)
    with pytest.raises(RequestError, match="which capture cannot record"):
        capture(net, SHAPE, torch.float64)
    assert module_state(net) == before and net.training


def test_a_flag_that_says_which_buffer_is_changed_is_refused() -> None:
    """Both forwards have the same operators: only the buffer that takes the new value is another."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(()))
            self.register_buffer("later", torch.zeros(()))
            self.began = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (self.later if self.began else self.first).copy_(x.mean())
            self.began = True
            return x * 2

    with pytest.raises(RequestError, match="'began'"):
        capture(Turns(), SHAPE, torch.float32)


def test_a_flag_of_evaluation_for_training_is_refused_in_evaluation() -> None:
    def middle(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.ready = net.ready or not net.training
        return x * 2 if net.ready else x

    net = Net(middle).double()
    capture(net, SHAPE, torch.float64)  # one process computes the same in training, as long as it never evaluates
    with pytest.raises(RequestError, match="changes the attribute 'ready'"):
        capture(net.eval(), SHAPE, torch.float64)
    assert not net.ready and not any(module.training for module in net.modules())


def test_flags_that_no_forward_reads_otherwise_are_no_change() -> None:
    def middle(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.kept["warned"] = net.ready = FLAGS["warned"] = True
        SEEN.add("warned")
        net.scale = float(x.shape[2])
        return x * net.scale

    net = Net(middle).double()
    before = module_state(net)
    program = capture(net, SHAPE, torch.float64)
    assert program.equals(capture(net, SHAPE, torch.float64))
    assert module_state(net) == before and not FLAGS and not SEEN


def test_equal_sets_are_one_state_in_any_order() -> None:
    """As the names that networks of transformers collect in sets."""
    net = Net(own_flag)
    net.names = {0, 8}
    before = module_state(net)
    other = {8, 0}
    assert [*other] != [*net.names]  # both have the same place in the table of a set
    net.names = other
    assert module_state(net) == before
    net.names.add(1)
    assert module_state(net) != before
