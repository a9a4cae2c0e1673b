"""How often a loss is called, what it may do with the output, and what it does not use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core import ParallelPlan, parallelize
from hyfi_core.errors import RequestError
from tests.harness import run_copies

SHAPE = (4, 3, 9, 8)


class Headed(nn.Module):
    """A network with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = torch.tanh(self.body(x))
        return self.first(maps.mean((2, 3))), self.second(maps)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, weight_decay=0.5)


def trained(model: nn.Module, plan: ParallelPlan, loss: Any, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the gradients and the weights after a step; the ranks have the same batch."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SHAPE, dtype=torch.float64, generator=generator)

    def body(comm: Any, module: nn.Module) -> Any:
        engine = parallelize(module, SHAPE, plan, comm, loss=loss, optimizer=sgd, **settings)
        engine.accumulate(images, torch.tensor([0, 1, 2, 0]))
        gradients = engine.gather_gradients()
        engine.update()
        return gradients, engine.gather_state_dict()

    return run_copies(model, plan.ranks, body)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "plan",
    [
        {"grids": ((1, 2),)},
        {"grids": ((1, 1),), "cells": (2, 2)},
        {"grids": ((1, 2), (1, 2)), "cuts": ("body",), "schedule": "chimera"},
        {"grids": ((1, 1),), "replicas": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["batch", "microbatch"])
def test_what_a_loss_does_not_use_has_no_gradient_and_does_not_decay(plan: dict[str, Any], over: str) -> None:
    """Gradients of zeros once let the weights of unused heads decay."""
    torch.manual_seed(0)
    model = Headed().double()
    before = copy.deepcopy(model.second.state_dict())
    gradients, state = trained(
        model, ParallelPlan(microbatches=2, **plan), lambda out, labels: F.cross_entropy(out[0], labels), loss_over=over
    )
    assert {name.split(".")[0] for name in gradients} == {"body", "first"}
    assert torch.equal(state["second.weight"], before["weight"])
    assert not torch.equal(state["first.weight"], model.first.weight)


@pytest.mark.parametrize("over", ["batch", "microbatch"])
def test_the_cells_of_a_process_call_a_loss_once(over: str) -> None:
    """A loss with state, such as a queue of earlier outputs, was once called by each cell."""
    calls: list[int] = []

    def loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        calls.append(len(labels))
        return output[1].square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plan = ParallelPlan(grids=((1, 1),), cells=(2, 2), microbatches=2)
    engine_calls: list[int] = []

    def body(comm: Any, module: nn.Module) -> None:
        engine = parallelize(module, SHAPE, plan, comm, loss=loss, loss_over=over)  # type: ignore[arg-type]
        images, labels = torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
        engine.accumulate(images, labels)  # labels are looked at in the first step
        calls.clear()
        engine.accumulate(images, labels)
        engine_calls.extend(calls)

    run_copies(Headed().double(), 1, body)
    assert engine_calls == ([4] if over == "batch" else [2, 2])


def test_a_loss_that_changes_the_output_in_place_is_refused() -> None:
    with pytest.raises(RequestError, match="changes the model's output in place"):
        trained(Headed().double(), ParallelPlan(grids=((1, 2),)), lambda out, labels: out[0].mul_(2).mean())


def test_an_output_of_one_number_may_be_a_part_of_a_tensor() -> None:
    """Its stride is that of the tensor; it could not be sent to other replicas."""

    class Risk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Headed()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)[0][:, 0]  # type: ignore[no-any-return]

    def ranked(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output.cumsum(0) * output.flip(0)).mean()

    torch.manual_seed(0)
    plan = ParallelPlan(grids=((1, 1),), replicas=2, microbatches=4)
    gradients, _ = trained(Risk().double(), plan, ranked)
    assert set(gradients) == {"net.body.weight", "net.body.bias", "net.first.weight", "net.first.bias"}
