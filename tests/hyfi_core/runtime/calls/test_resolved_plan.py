"""Automatic cuts are at modules that compute something in both modes of the model, and for the selected output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from tests.harness import run_copies

SHAPE = (2, 3, 16, 16)


class Auxiliary(nn.Module):
    """A head in the middle, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 1)
        self.auxiliary = nn.Conv2d(4, 64, 3, padding=1)
        self.auxiliary_fc, self.fc = nn.Linear(64, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        more = self.auxiliary_fc(self.auxiliary(x).mean((2, 3))) if self.training else None
        return self.fc(self.body(x).mean((2, 3))), more


class Distilled(nn.Module):
    """A student, and in training a frozen teacher after it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.student(x)
        if not self.training:
            return logits, None
        with torch.no_grad():
            return logits, self.teacher(x)


def both(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], labels) + F.mse_loss(output[1], output[0].detach() + 1)


def only(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], labels)


@pytest.mark.parametrize("selected", [False, True], ids=["all outputs", "logits"])
@pytest.mark.parametrize("network", [Auxiliary, Distilled])
def test_automatic_cuts_work_in_both_modes(network: type[nn.Module], selected: bool) -> None:
    plan = hyfi_core.ParallelPlan(grids=((1, 1), (1, 1)))
    torch.manual_seed(0)
    model, images, labels = network().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    given: dict[str, Any] = {"output": lambda out: out[0]} if selected else {"loss": both}

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, **given)
        output = engine.predict(images)
        return engine.accumulate(images, labels), output if selected else output[0]

    loss, logits = run_copies(model, plan.ranks, body)[0]
    wanted = (only if selected else both)(model(images), labels)
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(images)[0])
