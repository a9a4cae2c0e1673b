"""Replicas of unequal speed take unequal shares of a batch, and train as one process does that takes all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from data.loading.batches import BatchLayout
from hyfi_core import ParallelPlan
from hyfi_core.errors import RequestError
from tests.harness import run_copies
from tests.steps import Batch, adamw, assert_equal_steps, make_batches, one_process_steps, parallel_steps, sgd
from tests.test_plans import make
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.task import make_loss

SIZE_PX = (37, 45)
ONE = ((1, 1),)


def dealt(whole: list[list[Batch]], plan: ParallelPlan) -> list[list[Batch]]:
    """Return the batches of one process by step and replica, as training deals them."""
    assert plan.shares is not None
    layout = BatchLayout(tuple(share // plan.microbatches for share in plan.shares), plan.microbatches)
    places = [torch.tensor(layout.numbers(0, replica)) for replica in range(plan.replicas)]
    return [[(images[at], labels[at]) for at in places] for ((images, labels),) in whole]


def plan_with(shares: tuple[int, ...], **fields: Any) -> ParallelPlan:
    return ParallelPlan(**{"grids": ONE, **fields}, replicas=len(shares), shares=shares)


@pytest.mark.parametrize(
    ("shares", "fields"),
    [
        ((3, 1), {}),
        ((4, 2, 2), {"microbatches": 2}),
        ((2, 6), {"grids": ((1, 2),), "microbatches": 2, "recompute": True}),
        ((6, 2), {"grids": ((1, 1), (1, 1)), "cuts": "auto", "microbatches": 2}),
        ((2, 4), {"grids": ((1, 2), (1, 1)), "cuts": ("down1",), "microbatches": 2, "schedule": "chimera"}),
        (
            (6, 2),
            {
                "grids": ((1, 1), (1, 1)),
                "cuts": ("down1",),
                "microbatches": 2,
                "schedule": "gems_master",
                "mirror": "point_to_point",
            },
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_unequal_shares_train_as_one_process(shares: tuple[int, ...], fields: dict[str, Any]) -> None:
    """Batch norms over all replicas, class weights, momentum: losses, gradients, buffers, weights, five steps."""
    model, _ = make("hourglass")
    model, plan = model.double(), plan_with(shares, sync_batch_norm=True, **fields)
    batches, loss = (
        make_batches((sum(shares), 3, *SIZE_PX), 3, 1),
        make_loss(Multiclass(("label",), ("a", "b"), (0.4, 1.6)), 1),
    )
    found, _ = parallel_steps(model, dealt(batches, plan), plan, sgd, loss=loss)
    assert_equal_steps(found, one_process_steps(model, batches, plan.microbatches, sgd, loss))


class Dropping(nn.Module):
    """Dropout on a map and on features; no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, 2, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(torch.relu(self.norm(self.conv(x))), 0.3, self.training)
        return self.fc(nn.functional.dropout(x.mean((2, 3)), 0.5, self.training))


@pytest.mark.parametrize(("shares", "grid"), [((6, 2), (1, 1)), ((2, 4, 2), (1, 1)), ((2, 6), (2, 1))])
def test_every_sample_draws_the_same_numbers_whoever_takes_it(shares: tuple[int, ...], grid: tuple[int, int]) -> None:
    torch.manual_seed(3)
    model, batches = Dropping().double(), make_batches((8, 3, *SIZE_PX), 3, 1)
    alone, plan = ParallelPlan(ONE, microbatches=2), plan_with(shares, grids=(grid,), microbatches=2)
    wanted, _ = parallel_steps(model, batches, alone, adamw)
    found, _ = parallel_steps(model, dealt(batches, plan), plan, adamw)
    assert_equal_steps(found, wanted)


def test_equal_shares_are_no_shares() -> None:
    """Of one micro-batch: there every replica's batch is a piece of the whole one either way."""
    model, _ = make("hourglass")
    model, batches = model.double(), make_batches((4, 3, *SIZE_PX), 2, 1)
    plan = plan_with((2, 2), sync_batch_norm=True)
    parts = dealt(batches, plan)
    wanted, _ = parallel_steps(model, parts, ParallelPlan(ONE, replicas=2, sync_batch_norm=True), sgd)
    assert_equal_steps(parallel_steps(model, parts, plan, sgd)[0], wanted, tolerance=1e-12)


def test_gradients_accumulate_over_calls() -> None:
    model, _ = make("hourglass")
    model, plan = model.double(), plan_with((3, 1), sync_batch_norm=True)
    batches = make_batches((4, 3, *SIZE_PX), 1, 1)
    (parts,) = dealt(batches, plan)

    def body(comm: Any, module: nn.Module) -> Any:
        images, labels = parts[comm.rank]
        engine = hyfi_core.parallelize(module, tuple(images.shape), plan, comm)  # type: ignore[arg-type]
        first = engine.accumulate(images, labels)
        once = engine.gather_gradients()
        return first, once, engine.accumulate(images, labels), engine.gather_gradients()

    first, once, second, twice = run_copies(model, 2, body)[0]
    assert second == pytest.approx(first, rel=1e-12)  # statistics are the batch's own
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=1e-9, atol=1e-12)


def test_a_batch_that_is_not_the_share_is_refused() -> None:
    plan = plan_with((3, 1))

    def wrong_shape(comm: Any, module: nn.Module) -> None:
        hyfi_core.parallelize(module, (2, 3, *SIZE_PX), plan, comm)

    def wrong_batch(comm: Any, module: nn.Module) -> None:
        engine = hyfi_core.parallelize(module, ((3, 1)[comm.rank], 3, *SIZE_PX), plan, comm)
        engine.accumulate(torch.zeros(2, 3, *SIZE_PX), torch.zeros(2, dtype=torch.long))

    for body in (wrong_shape, wrong_batch):
        with pytest.raises(RequestError, match=r"replica \d takes [31] of every 4 samples .* got a batch of 2"):
            run_copies(Dropping(), 2, body)
