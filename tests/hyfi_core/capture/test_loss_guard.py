"""A loss computes the same on every rank, or is refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.errors import RequestError
from tests.harness import run_copies

SHAPE = (2, 3, 8, 9)
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
SPATIAL = hyfi_core.ParallelPlan(grids=((1, 2),))
STAGES = hyfi_core.ParallelPlan(grids=((1, 1), (1, 1)), cuts=("1",))
ALONE = hyfi_core.ParallelPlan(grids=((1, 1),))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double()


class Scaled(nn.Module):
    """Cross entropy of logits at a temperature, as metric learning uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits * self.temperature, labels)


def frozen() -> nn.Module:
    return Scaled().requires_grad_(False)


def penalty(model: nn.Sequential, of: Callable[[nn.Sequential], list[torch.Tensor]]) -> Loss:
    return lambda logits, labels: F.cross_entropy(logits, labels) + 0.1 * sum(t.square().sum() for t in of(model))


def everything(model: nn.Sequential) -> list[torch.Tensor]:
    return list(model.parameters())


def head(model: nn.Sequential) -> list[torch.Tensor]:
    return list(model[5].parameters())


def detached(model: nn.Sequential) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def statistics(model: nn.Sequential) -> list[torch.Tensor]:
    return [model[1].running_mean]  # type: ignore[list-item]


def noisy(model: nn.Sequential) -> Loss:
    return lambda logits, labels: F.cross_entropy(logits + torch.rand_like(logits), labels)


def attending(model: nn.Sequential) -> Loss:
    """Return a loss of attention over the batch, without dropout: its operator has the tag of those that draw."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = logits[None, None]
        return F.cross_entropy(F.scaled_dot_product_attention(rows, rows, rows)[0, 0], labels)

    return loss


def run(loss: Callable[[nn.Sequential], Loss], plan: hyfi_core.ParallelPlan) -> list[Any]:
    images = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1])

    def body(comm: Any, module: nn.Module) -> Any:
        assert isinstance(module, nn.Sequential)
        engine = hyfi_core.parallelize(
            module, SHAPE, plan, comm, loss=loss(module), optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)
        )
        losses = [engine.train_step(images, labels) for _ in range(3)]
        return losses, engine.gather_state_dict()

    return run_copies(network(), plan.ranks, body)


@pytest.mark.parametrize(
    ("loss", "plan", "words"),
    [
        (lambda model: penalty(model, everything), STAGES, r"reads '0.weight' of the model \(.*_loss_guard.py:\d+ "),
        (lambda model: penalty(model, detached), STAGES, "reads '0.weight' of the model"),
        (lambda model: penalty(model, statistics), STAGES, "reads '1.running_mean' of the model"),
        (lambda model: Scaled(), SPATIAL, r"trainable parameter of shape \(\) that the model's forward does not use"),
        (lambda model: Scaled(), STAGES, r"trainable parameter of shape \(\)"),
        (noisy, SPATIAL, r"draws random numbers \(.*_loss_guard.py:\d+ "),
    ],
)
def test_what_ranks_do_not_share_is_refused(loss: Any, plan: hyfi_core.ParallelPlan, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run(loss, plan)


@pytest.mark.parametrize(
    ("loss", "plan"),
    [
        (lambda model: penalty(model, everything), SPATIAL),
        (lambda model: penalty(model, statistics), SPATIAL),
        (lambda model: penalty(model, head), STAGES),
        (lambda model: frozen(), SPATIAL),
        (attending, SPATIAL),
        (lambda model: Scaled(), ALONE),
    ],
)
def test_what_ranks_share_trains_as_in_one_process(loss: Any, plan: hyfi_core.ParallelPlan) -> None:
    found = run(loss, plan)
    model = network()
    images = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.1), loss(model)
    for step in range(3):
        optimizer.zero_grad()
        value = criterion(model(images), torch.tensor([0, 1]))
        value.backward()
        optimizer.step()
        assert all(abs(losses[step] - value.item()) < 1e-10 for losses, _ in found)
    assert all((found[0][1][name] - value).abs().max() < 1e-10 for name, value in model.state_dict().items())


def test_a_loss_may_draw_where_no_rank_could_draw_others() -> None:
    assert len({*run(noisy, ALONE)[0][0]}) == 3
