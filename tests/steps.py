"""Several training steps under a plan, held against one process that does the same, replicas and optimiser too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.runtime.saving.optimizer_state import optimizer_state
from tests.harness import Loss, run_copies

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, eps=1e-4)


@dataclass
class Steps:
    """What some steps left behind: losses, first gradients, weights and buffers, the optimiser's tensors."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


Batch = tuple[torch.Tensor, torch.Tensor]


def make_batches(shape: tuple[int, int, int, int], steps: int, replicas: int, classes: int = 2) -> list[list[Batch]]:
    """Return batches by step and replica, in float64."""
    generator = torch.Generator().manual_seed(7)
    return [
        [
            (
                torch.randn(shape, dtype=torch.float64, generator=generator),
                torch.randint(0, classes, (shape[0],), generator=generator),
            )
            for _ in range(replicas)
        ]
        for _ in range(steps)
    ]


def one_process_steps(
    model: nn.Module, batches: list[list[Batch]], microbatches: int, factory: Factory, loss: Loss = F.cross_entropy
) -> Steps:
    """The reference: each replica's batch through a copy of the module, gradients averaged, statistics of the first."""
    copies = [copy.deepcopy(model) for _ in batches[0]]
    optimizers = [factory(list(module.parameters())) for module in copies]
    losses, first = [], {}
    for step in batches:
        total = 0.0
        for module, (images, labels) in zip(copies, step, strict=True):
            for part, targets in zip(images.chunk(microbatches), labels.chunk(microbatches), strict=True):
                share = loss(module(part), targets) / (microbatches * len(copies))
                share.backward()
                total += share.item()
        for group in zip(*(module.parameters() for module in copies), strict=True):
            if group[0].grad is not None:
                mean = torch.stack([p.grad for p in group]).sum(0)
                for p in group:
                    p.grad = mean.clone()
        first = first or {n: p.grad.clone() for n, p in copies[0].named_parameters() if p.grad is not None}
        losses.append(total)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    tensors = optimizer_state(optimizers[0], copies[0].named_parameters())["tensors"]
    return Steps(losses, first, copies[0].state_dict(), tensors)


def parallel_steps(
    model: nn.Module,
    batches: list[list[Batch]],
    plan: hyfi_core.ParallelPlan,
    factory: Factory,
    strict: bool = True,
    loss: Loss = F.cross_entropy,
    release: bool = False,
) -> tuple[Steps, list[Any]]:
    """The same on thread-ranks; also what each rank's engine says of its traffic and events."""

    def body(comm: Any, module: nn.Module) -> Any:
        replica = comm.rank // plan.ranks_per_replica
        shape = tuple(batches[0][replica][0].shape)
        given: Any = {"loss": loss, "optimizer": factory, "release": release}
        engine = hyfi_core.parallelize(module, shape, plan, comm, **given)  # type: ignore[arg-type]
        losses, first = [], None
        for index, step in enumerate(batches):
            losses.append(engine.accumulate(*step[replica]))
            if index == 0:
                first = engine.gather_gradients()
            engine.update()
        named = [(name, p) for name, p in module.named_parameters()]
        used = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        known = used <= {id(p) for _, p in named}
        tensors = optimizer_state(engine.optimizer, named)["tensors"] if known else {}
        return losses, first, engine.gather_state_dict(), tensors, (engine.traffic(), engine.events)

    results = run_copies(model, plan.ranks, body, strict=strict)
    assert all(result[0] == results[0][0] for result in results), "ranks disagree on the losses"
    optimizer: dict[str, torch.Tensor] = {}
    for result in results:
        for name, tensor in result[3].items():
            assert name not in optimizer or torch.equal(optimizer[name], tensor), f"owners disagree on {name}"
            optimizer[name] = tensor
    return Steps(results[0][0], results[0][1], results[0][2], optimizer), [result[4] for result in results]


def assert_equal_steps(found: Steps, wanted: Steps, tolerance: float = 1e-8) -> None:
    """Losses, weights and optimiser within ``tolerance``; the first step's gradients within 1e-10."""
    for a, b in zip(found.losses, wanted.losses, strict=True):
        assert abs(a - b) <= tolerance * max(1.0, abs(b))
    everything = torch.cat([g.flatten() for g in wanted.gradients.values()]).norm()
    assert set(found.gradients) == set(wanted.gradients)
    for name, gradient in wanted.gradients.items():
        error = (found.gradients[name] - gradient).norm()
        assert error <= 1e-10 * max(gradient.norm(), 1e-3 * everything), f"gradient of {name}: {error:.1e}"
    assert list(found.state) == list(wanted.state)
    for group, expected in ((found.state, wanted.state), (found.optimizer, wanted.optimizer)):
        assert set(group) == set(expected)
        for name, tensor in expected.items():
            scale = max(1.0, float(tensor.abs().max()))
            assert (group[name].double() - tensor.double()).abs().max() <= tolerance * scale, name


def assert_plan_equals_one_process(
    model: nn.Module,
    shape: tuple[int, int, int, int],
    plan: hyfi_core.ParallelPlan,
    *,
    factory: Factory = sgd,
    steps: int = 3,
    strict: bool = True,
    release: bool = False,
) -> list[Any]:
    """Train some steps both ways in float64 and compare everything; the third uses what two updates left behind."""
    model = model.double()
    batches = make_batches(shape, steps, plan.replicas)
    found, told = parallel_steps(model, batches, plan, factory, strict, release=release)
    assert_equal_steps(found, one_process_steps(model, batches, plan.microbatches, factory))
    return told
