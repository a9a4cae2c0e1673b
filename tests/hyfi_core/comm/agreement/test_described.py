"""Texts of functions are equal where what they hold is."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.comm.agreement.described import describe_function
from tests.conftest import PROGRAM_PATH


class Focal:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (o - y).abs().pow(self.gamma).mean()

    def summed(self, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(o, y)


def nested(o: torch.Tensor, y: torch.Tensor, given: dict[str, list[float]]) -> torch.Tensor:
    return o.mean() * given["a"][0]


MAKERS: dict[str, Any] = {
    "object": Focal,
    "method": lambda gamma: Focal(gamma).summed,
    "partial": lambda gamma: functools.partial(nested, given={"a": [gamma]}),
    "closure": lambda gamma: lambda o, y: o.mean() * gamma,
    "function in a closure": lambda gamma: (lambda inner: lambda o, y: inner(o))(lambda o: o * gamma),
    "module": lambda gamma: nn.HuberLoss(delta=gamma),
    "module in a closure": lambda gamma: (lambda inner: lambda o, y: inner(o, y))(nn.HuberLoss(delta=gamma)),
    "tensor": lambda gamma: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([gamma])),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_values_that_a_function_holds_count(kind: str) -> None:
    make = MAKERS[kind]
    assert describe_function(make(1.0)) == describe_function(make(1.0))
    assert describe_function(make(1.0)) != describe_function(make(2.0))


def test_the_order_of_a_set_in_code_does_not_count() -> None:
    code = (
        "from hyfi_core.comm.agreement.described import describe_function as d\n"
        "print(d(lambda o, y: o if o.name in {'a', 'bc', 'def', 'ghij'} else y))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": PROGRAM_PATH},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1


def test_the_model_that_a_loss_holds_is_left_out() -> None:
    """Its weights may differ at the start, and between the ranks of several stages."""

    def texts(model: nn.Module) -> list[str]:
        losses: Any = [
            model.forward,
            lambda o, y: o.mean() + model[0].weight.sum(),
            functools.partial(nested, given=model),
        ]
        return [describe_function(loss, frozenset(model.modules())) for loss in losses]

    first, second = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)) for _ in "12")
    assert texts(first) == texts(second)
    assert describe_function(first.forward) != describe_function(second.forward)
