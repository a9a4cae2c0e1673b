"""One process that computes the loss over the logits of the whole batch, and plans that must give the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import hyfi_core
from hyfi_core import ParallelPlan
from tests.harness import run_copies

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
CLASSES = 3
SIZE_PX = (11, 14)


class Net(nn.Module):
    """Batch norm, whose statistics are those of each micro-batch, maps of two branches, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Conv2d(4, 5, 3, padding=1)
        self.side = nn.Conv2d(4, 5, 1)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.head(torch.relu(self.second(y) + self.side(y)).mean((2, 3)))


def cox(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The negative partial log-likelihood of (time, event)."""
    order = torch.argsort(labels[:, 0], descending=True)
    risk, event = logits[order, 0], labels[order, 1]
    return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum().clamp(min=1)


def contrastive(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Pairs of one class attract, others repel."""
    distances = (logits[:, None] - logits[None]).square().sum(2)
    alike = labels[:, None] == labels[None]
    return torch.where(alike, distances, F.relu(2.0 - distances)).triu(1).sum() / len(labels)


def masked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Weights and a mask of each sample, which stand behind the target."""
    target, weight, mask = labels.unbind(1)
    wrong = (logits[:, 1] - target).square() * weight
    return (wrong * mask).sum() / (weight * mask).sum()


def classes(count: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randint(0, CLASSES, (count,), generator=generator)
    drawn[0] = 0  # a batch in which all labels are ignored has no loss
    return drawn


def several(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (count, CLASSES), generator=generator).double()


def reals(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)


def survival(count: int, generator: torch.Generator) -> torch.Tensor:
    times = torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.stack([times, (torch.arange(count) % 3 > 0).double()], 1)


def weighted(count: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.rand(count, 3, generator=generator, dtype=torch.float64)
    drawn[:, 2] = (torch.arange(count) % 2 == 0).double()
    return drawn


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOSSES: dict[str, tuple[Loss, Callable[[int, torch.Generator], torch.Tensor]]] = {
    "cross_entropy": (F.cross_entropy, classes),
    "class_weights": (nn.CrossEntropyLoss(weight=double(1.0, 5.0, 20.0)), classes),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=1), classes),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), classes),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=double(1.0, 3.0, 0.5)), several),
    "mse": (F.mse_loss, reals),
    "cox": (cox, survival),
    "contrastive": (contrastive, classes),
    "masked": (masked, weighted),
}
ONE, TWO = ((1, 1),), ((1, 1), (1, 1))
CUT: dict[str, Any] = {"grids": TWO, "cuts": ("first",)}
PLANS: dict[str, ParallelPlan] = {
    "alone": ParallelPlan(ONE),
    "2 micro-batches": ParallelPlan(ONE, microbatches=2),
    "4 micro-batches": ParallelPlan(ONE, microbatches=4),
    "gpipe": ParallelPlan(ONE, microbatches=4, schedule="gpipe"),
    "recompute": ParallelPlan(ONE, microbatches=2, schedule="gpipe", recompute=True),
    "1 x 2": ParallelPlan(((1, 2),)),
    "2 x 1, 3 micro-batches": ParallelPlan(((2, 1),), microbatches=3),
    "stages": ParallelPlan(**CUT),
    "stages 1f1b": ParallelPlan(**CUT, microbatches=4),
    "stages gpipe": ParallelPlan(**CUT, microbatches=3, schedule="gpipe"),
    "stages sequential": ParallelPlan(**CUT, microbatches=2, schedule="sequential"),
    "gems_mast": ParallelPlan(**CUT, microbatches=4, schedule="gems_mast"),
    "gems_master": ParallelPlan(**CUT, microbatches=4, schedule="gems_master"),
    "chimera": ParallelPlan(**CUT, microbatches=4, schedule="chimera"),
    "chimera of 2": ParallelPlan(**CUT, microbatches=2, schedule="chimera", mirror="point_to_point"),
    "mirrored": ParallelPlan(**CUT, microbatches=4, schedule="gems_master", mirror="point_to_point"),
    "interleaved": ParallelPlan(TWO, ("first.0", "first", "second"), microbatches=2, interleave=2),
    "replicas": ParallelPlan(ONE, replicas=2),
    "replicas, micro-batches": ParallelPlan(ONE, replicas=2, microbatches=2),
    "replicas of stages": ParallelPlan(**CUT, replicas=2, microbatches=2),
    "replicas, two directions": ParallelPlan(**CUT, replicas=2, microbatches=2, schedule="gems_mast"),
    "shares": ParallelPlan(ONE, replicas=2, shares=(3, 1)),
    "shares, micro-batches": ParallelPlan(ONE, replicas=2, shares=(4, 2), microbatches=2),
    "branches": ParallelPlan(ONE, branches=2, microbatches=2),
    "branches of stages": ParallelPlan(**CUT, branches=2, microbatches=2, schedule="gpipe"),
    "branches of replicas": ParallelPlan(ONE, branches=2, replicas=2),
    "cells": ParallelPlan(ONE, cells=(2, 2), microbatches=2),
    "spilled cells": ParallelPlan(ONE, cells=(2, 1), spill="memory", microbatches=2),
    "cells of replicas": ParallelPlan(ONE, cells=(1, 2), replicas=2, microbatches=2),
}


def samples(plan: ParallelPlan, microbatch: int = 2) -> list[int]:
    """Return the images of each replica."""
    return list(plan.shares) if plan.shares else [microbatch * plan.microbatches] * plan.replicas


def dealt(whole: torch.Tensor, plan: ParallelPlan, counts: list[int]) -> list[torch.Tensor]:
    """Return each replica's part of the whole batch; with shares, micro-batches come first."""
    if not plan.shares:
        return list(whole.split(counts))
    parts: list[list[torch.Tensor]] = [[] for _ in counts]
    for chunk in whole.chunk(plan.microbatches):
        for part, taken in zip(parts, chunk.split([count // plan.microbatches for count in counts]), strict=True):
            part.append(taken)
    return [torch.cat(part) for part in parts]


def one_process(
    model: nn.Module, images: list[torch.Tensor], labels: torch.Tensor, plan: ParallelPlan, loss: Loss, output: Any
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return loss, gradients and state: micro-batches one after the other, one loss over all logits."""
    copies = [copy.deepcopy(model) for _ in images]
    logits = [
        [module(part) for part in batch.chunk(plan.microbatches)] for module, batch in zip(copies, images, strict=True)
    ]
    ordered = [part for row in (zip(*logits, strict=True) if plan.shares else logits) for part in row]
    flat, structure = zip(*(tree_flatten(part) for part in ordered), strict=True)
    joined = [
        leaves[0] if isinstance(leaves[0], nn.Parameter) else torch.cat(leaves) for leaves in zip(*flat, strict=True)
    ]
    whole = tree_unflatten(joined, structure[0])
    value = loss(output(whole), labels)
    value.backward()
    named = [dict(module.named_parameters()) for module in copies]
    gradients = {name: sum(each[name].grad for each in named if each[name].grad is not None) for name in named[0]}
    return value.item(), gradients, copies[0].state_dict()


def assert_loss_of_whole_batch(
    loss: Loss,
    make_labels: Callable[[int, torch.Generator], torch.Tensor],
    plan: ParallelPlan,
    *,
    model: nn.Module | None = None,
    output: Callable[[Any], Any] | None = None,
    microbatch: int = 2,
    seed: int = 3,
    **settings: Any,
) -> list[Any]:
    """Compare loss, every gradient and every buffer in float64; return the engines' descriptions."""
    torch.manual_seed(seed)
    model = (Net() if model is None else model).double()
    generator = torch.Generator().manual_seed(seed)
    counts = samples(plan, microbatch)
    images = torch.randn(sum(counts), 3, *SIZE_PX, generator=generator, dtype=torch.float64)
    labels = make_labels(sum(counts), generator)
    mine, targets = dealt(images, plan, counts), dealt(labels, plan, counts)

    def body(comm: Any, module: nn.Module) -> Any:
        replica = comm.rank // plan.ranks_per_replica
        given: Any = {"loss": loss, "output": output, **settings}
        engine = hyfi_core.parallelize(module, tuple(mine[replica].shape), plan, comm, **given)  # type: ignore[arg-type]
        value = engine.accumulate(mine[replica], targets[replica])
        return value, engine.gather_gradients(), engine.gather_state_dict(), engine.describe()

    found = run_copies(model, plan.ranks, body, strict=plan.cells is None)
    assert len({each[0] for each in found}) == 1, "ranks disagree on the loss"
    value, gradients, state = one_process(model, mine, labels, plan, loss, output or (lambda out: out))
    assert abs(found[0][0] - value) <= 1e-10 * max(1.0, abs(value))
    everything = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert set(found[0][1]) == set(gradients)
    for name, gradient in gradients.items():
        error = (found[0][1][name] - gradient).norm()
        assert error <= 1e-10 * max(gradient.norm(), 1e-3 * everything), f"{name}: {error:.1e}"
    for name, tensor in state.items():
        assert (found[0][2][name] - tensor).abs().max() <= 1e-10 * max(1.0, float(tensor.abs().max())), name
    return [each[3] for each in found]
