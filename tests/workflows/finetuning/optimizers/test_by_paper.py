"""Lion, LAMB and schedule-free optimizers against their papers' formulas, written plainly, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from workflows.finetuning.optimizers.lamb import Lamb
from workflows.finetuning.optimizers.lion import Lion
from workflows.finetuning.optimizers.schedule_free import ScheduleFree, ScheduleFreeAdamW, ScheduleFreeSGD

STEPS, LR, DECAY = 7, 0.03, 0.2


def start() -> torch.Tensor:
    return torch.tensor([[0.5, -1.0, 2.0], [0.1, 0.0, -0.3]], dtype=torch.float64)


def gradient_at(w: torch.Tensor, step: int) -> torch.Tensor:
    return torch.sin(3 * w + step) + 0.1 * w


def stepped(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, rate: Callable[[int], float]) -> None:
    for step in range(STEPS):
        weight.grad = gradient_at(weight.detach(), step)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()


def constant(step: int) -> float:
    return LR


def warmed(step: int) -> float:
    return LR * min(1.0, (step + 1) / 3)


def test_lion_is_the_papers() -> None:
    weight = torch.nn.Parameter(start())
    stepped(Lion([weight], betas=(0.8, 0.95), weight_decay=DECAY), weight, constant)
    w, m = start(), torch.zeros(2, 3, dtype=torch.float64)
    for step in range(STEPS):
        g = gradient_at(w, step)
        c = 0.8 * m + (1 - 0.8) * g
        w = w - LR * (torch.sign(c) + DECAY * w)
        m = 0.95 * m + (1 - 0.95) * g
    torch.testing.assert_close(weight.data, w, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_lamb_is_the_papers_also_from_zero(decay: float) -> None:
    weight, bias = torch.nn.Parameter(start()), torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    optimizer = Lamb([weight, bias], betas=(0.8, 0.9), weight_decay=decay)
    for step in range(STEPS):
        weight.grad, bias.grad = gradient_at(weight.detach(), step), gradient_at(bias.detach(), step)
        optimizer.param_groups[0]["lr"] = LR
        optimizer.step()
    for here, w in ((weight, start()), (bias, torch.zeros(2, 3, dtype=torch.float64))):
        m = v = torch.zeros(2, 3, dtype=torch.float64)
        for step in range(STEPS):
            g = gradient_at(w, step)
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            r = (m / (1 - 0.8 ** (step + 1))) / ((v / (1 - 0.9 ** (step + 1))).sqrt() + 1e-6) + decay * w
            length = math.sqrt(float((w * w).sum()))
            w = w - LR * (length / math.sqrt(float((r * r).sum())) if length else 1.0) * r
        torch.testing.assert_close(here.data, w, rtol=1e-11, atol=1e-13)


def paper(rate: Callable[[int], float], beta: float, beta2: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, x) after all steps; beta2 None: SGD."""
    z = x = y = start()
    v, total = torch.zeros_like(z), 0.0
    for step in range(STEPS):
        lr = rate(step)
        g = gradient_at(y, step)
        v = v if beta2 is None else beta2 * v + (1 - beta2) * g * g
        d = g if beta2 is None else g / ((v / (1 - beta2 ** (step + 1))).sqrt() + 1e-8)
        z = z - lr * (d + DECAY * y)
        total += lr**2
        x = (1 - lr**2 / total) * x + lr**2 / total * z
        y = (1 - beta) * z + beta * x
    return y, x


KINDS: dict[str, tuple[Callable[..., ScheduleFree], dict[str, Any], float | None]] = {
    "adamw": (ScheduleFreeAdamW, {"betas": (0.7, 0.9)}, 0.9),
    "sgd": (ScheduleFreeSGD, {"momentum": 0.7}, None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [constant, warmed])
def test_schedule_free_is_the_papers_and_switches_back_and_forth(kind: str, rate: Callable[[int], float]) -> None:
    make, options, beta2 = KINDS[kind]
    weight = torch.nn.Parameter(start())
    optimizer = make([weight], weight_decay=DECAY, **options)
    stepped(optimizer, weight, rate)
    y, x = paper(rate, 0.7, beta2)
    torch.testing.assert_close(weight.data, y, rtol=1e-11, atol=1e-13)
    optimizer.eval()
    torch.testing.assert_close(weight.data, x, rtol=1e-11, atol=1e-13)
    optimizer.train()
    torch.testing.assert_close(weight.data, y, rtol=1e-11, atol=1e-13)
    assert (x - y).abs().max() > 1e-4


def test_a_parameter_that_is_trained_later_begins_as_if_it_were_the_first() -> None:
    """Its bias correction and its average are its own: the first step of Adam is as long as the learning rate."""
    early, late = (torch.nn.Parameter(start()) for _ in range(2))
    optimizer = ScheduleFreeAdamW([early, late], lr=LR)
    for step in range(STEPS):
        early.grad = gradient_at(early.detach(), step)
        optimizer.step()
    late.grad = torch.ones_like(late)
    optimizer.step()
    torch.testing.assert_close(late.data, start() - LR, rtol=1e-6, atol=1e-8)


def test_an_average_without_share_is_refused() -> None:
    with pytest.raises(ValueError, match="use a number between 0 and 1"):
        ScheduleFreeSGD([torch.nn.Parameter(start())], momentum=0.0)
