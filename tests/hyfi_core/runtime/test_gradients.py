"""Gradients are reduced in buckets while backward still runs, in place, and in another type if asked."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.errors import RequestError
from hyfi_core.runtime import gradients
from tests.harness import run_copies


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3 if n == 0 else 4, 4, 3, padding=1) for n in range(4)))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layers(x).mean((2, 3)))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 3, 16, 16, generator=generator), torch.tensor([0, 1])


@pytest.mark.parametrize(("grid", "replicas"), [((1, 1), 2), ((1, 2), 1)])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_buckets_start_while_backward_runs(grid: tuple[int, int], replicas: int, microbatches: int) -> None:
    seen: list[torch.Tensor] = []
    last: list[int] = []

    def body(comm: Any, module: nn.Module) -> Any:
        plan = ParallelPlan((grid,), microbatches=microbatches, replicas=replicas)
        engine = hyfi_core.parallelize(module, (2, 3, 16, 16), plan, comm)
        gradients = engine._shared_by(engine._lowered(engine._runners[0].reader.micro_shape((2, 3, 16, 16))))[0]
        if comm.rank == 0:
            (group,) = gradients._groups
            original = group._comm.start_all_reduce

            def started(tensor: torch.Tensor, *rest: Any) -> Any:
                first = module.layers[0].weight.grad
                if tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr():
                    last.append(len(seen))
                seen.append(first.clone())
                return original(tensor, *rest)

            group._comm.start_all_reduce = started  # type: ignore[method-assign]
        engine.accumulate(*batch(0))

    with mock.patch.object(gradients, "BUCKET_BYTES", 1):
        run_copies(Deep(), 2, body)
    (whole,) = last
    assert len(seen) == 10
    unfinished = [not torch.equal(gradient, seen[whole]) for gradient in seen[:whole]]
    assert sum(unfinished) >= 6, "reductions start while the first layer's gradient is still to come"


def test_gradients_may_travel_as_bfloat16() -> None:
    def body(comm: Any, module: nn.Module, dtype: Any) -> Any:
        plan = ParallelPlan(((1, 1),), replicas=2, reduce_dtype=dtype)
        engine = hyfi_core.parallelize(module, (2, 3, 16, 16), plan, comm)
        engine.accumulate(*batch(comm.rank))
        return engine.gather_gradients(), engine.traffic()["reduce"]["bytes"]

    model = Deep()
    full, full_bytes = run_copies(model, 2, lambda comm, module: body(comm, module, None))[0]
    half, half_bytes = run_copies(model, 2, lambda comm, module: body(comm, module, "bfloat16"))[0]
    assert half_bytes < 0.6 * full_bytes
    for name, gradient in full.items():
        assert half[name].dtype == torch.float32
        assert 0 < (half[name] - gradient).norm() <= 1e-2 * gradient.norm()


def test_gradients_lie_in_their_buckets() -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        plan = ParallelPlan(((1, 1),), replicas=2)
        engine = hyfi_core.parallelize(module, (2, 3, 16, 16), plan, comm)
        engine.accumulate(*batch(comm.rank))
        first = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
        for p in module.parameters():
            p.grad = None
        engine.accumulate(*batch(comm.rank))
        return len(first), first == {p.grad.untyped_storage().data_ptr() for p in module.parameters()}

    assert run_copies(Deep(), 2, body)[0] == (1, True)  # one bucket, the same memory at every step


class Twice(nn.Module):
    """A network with a hidden layer, a norm, and weights that are used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 3, 3, 1, 1), nn.BatchNorm2d(3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(self.norm(self.conv(x)).relu()).mean((2, 3)))


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_hooks_on_parameters_see_whole_gradients(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, shape = Twice().double(), (2, 3, 12, 10)
    images, labels, ends = torch.randn(shape, dtype=torch.float64), torch.tensor([0, 1]), []

    def hooked(module: nn.Module) -> nn.Module:
        for p in module.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
            p.register_hook(lambda g: g + 1)
            p.register_post_accumulate_grad_hook(lambda q: ends.append(q.grad.mul_(q.grad)))
        return module

    reference = hooked(copy.deepcopy(model))
    for _ in range(2):
        F.cross_entropy(reference(images), labels).backward()

    def body(comm: Any, module: nn.Module) -> Any:
        hooked(module)
        engine = hyfi_core.parallelize(module, shape, hyfi_core.ParallelPlan((grid,)), comm)
        for _ in range(2):
            engine.accumulate(images, labels)
        assert all(len(p._backward_hooks) == 2 for p in module.parameters())
        return {name: p.grad for name, p in module.named_parameters()}

    for found in run_copies(model, grid[0] * grid[1], body):
        for name, p in reference.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-10, atol=1e-12)
    assert ends


def test_hooks_on_parameters_are_refused_where_one_process_would_call_them_several_times() -> None:
    model, plan = Twice(), hyfi_core.ParallelPlan(((1, 1),), microbatches=2)
    engine = hyfi_core.parallelize(model, (2, 3, 12, 10), plan, hyfi_core.init(), verify=False)
    model.head.bias.register_hook(lambda g: g.clamp(-1, 1))
    with pytest.raises(RequestError, match=r"'head.bias' has a gradient hook, .* each of 2 micro-batches"):
        engine.accumulate(torch.zeros(2, 3, 12, 10), torch.tensor([0, 1]))
    assert len(model.head.bias._backward_hooks) == 1


@pytest.mark.parametrize("gradient", [[3.0, 4.0], [0.3, 0.4], [0.0, float("inf")], [1.0, float("nan")]])
def test_gradients_are_clipped_as_torch_clips_them_also_if_they_are_not_finite(gradient: list[float]) -> None:
    both = []
    for clip in (lambda ps: gradients.clip(ps, ps, 1.0, None), lambda ps: nn.utils.clip_grad_norm_(ps, 1.0)):
        parameters = [nn.Parameter(torch.zeros(1)) for _ in gradient]
        for parameter, value in zip(parameters, gradient, strict=True):
            parameter.grad = torch.tensor([value])
        norm = clip(parameters)
        both.append([float(norm), *(float(p.grad) for p in parameters if p.grad is not None)])
    assert both[0] == pytest.approx(both[1], nan_ok=True)
