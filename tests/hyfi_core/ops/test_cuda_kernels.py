"""Operators called by name pass what CUDA's kernels accept; on a GPU they equal plain PyTorch in float64 on a CPU."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.waits import waited
from hyfi_core.ops import avg_pool
from hyfi_core.ops.max_pool import WholeMaxPool
from hyfi_core.ops.norms.batch_norm import BatchNorm, FusedBatchNorm
from hyfi_core.ops.norms.known_statistics import KnownStatistics
from hyfi_core.ops.redistribute import is_channels_last
from hyfi_core.plan.box import Box
from hyfi_core.plan.window import AxisWindow, Window
from tests.harness import run_copies
from tests.hyfi_core.ops import cuda_kernels
from tests.hyfi_core.ops.cuda_kernels import KERNELS, CheckedCalls, ComparedCalls

SHAPE = (2, 3, 26, 22)
ON_A_GPU = {"batch_norm_backward_elemt.default", "batch_norm_elemt.default"}  # a CPU has no such kernels
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.15}
PLANS = {
    "columns": hyfi_core.ParallelPlan(grids=((1, 2),), fused_halo=1),
    "fused": hyfi_core.ParallelPlan(grids=((2, 1),), fused_halo=8),
    "cells": hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2)),
    "pieces": hyfi_core.ParallelPlan(grids=((1, 1),), interleave=3, recompute=True),
    "pieces of cells": hyfi_core.ParallelPlan(grids=((1, 1),), interleave=3, recompute=True, cells=(2, 2)),
}


class BiasAlone(nn.BatchNorm2d):
    """A batch norm with a bias and no weight."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.weight = None  # type: ignore[assignment]


def network() -> nn.Module:
    """Every kind of operator with a backward of its own, and maps of few values: pools see ties."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False),
        nn.BatchNorm2d(8, affine=False),
        nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.Conv2d(8, 8, 3, 2, 2, dilation=2, bias=False),
        BiasAlone(8),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def step(
    plan: hyfi_core.ParallelPlan,
    kind: torch.dtype,
    device: str,
    order: torch.memory_format,
    compared: ComparedCalls | None = None,
) -> Any:
    """Return (gradients of a step, calls) of one rank; with ``compared``, wrong calls of all are noted there."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SHAPE, dtype=torch.float64, generator=generator).to(device, kind)
    labels = torch.tensor([0, 1], device=device)
    model = network().to(device, kind, memory_format=order)

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, verify=False)
        with compared or contextlib.nullcontext(), CheckedCalls() as checked:
            engine.accumulate(images, labels)
        return engine.gather_gradients(), checked.calls

    if plan.ranks > 1:
        return run_copies(model, plan.ranks, body)[0]
    return body(AloneCommunicator(), model)


def as_on_a_gpu() -> Any:
    """Context in which padded average pools are computed on a CPU as on a GPU."""
    return mock.patch.object(
        avg_pool, "gradient_forgets_padding", lambda x, padding: any(padding) and is_channels_last(x)
    )


def reference() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model, images = network().double(), torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    F.cross_entropy(model(images), torch.tensor([0, 1])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("plan", ["columns", "fused"])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_calls_of_a_step_are_accepted_by_cuda(kind: torch.dtype, order: torch.memory_format, plan: str) -> None:
    with as_on_a_gpu():
        _, calls = step(PLANS[plan], kind, "cpu", order)
    checked = {name for name, kernel in KERNELS.items() if kernel.accepts is not None}
    assert plan == "fused" or checked - ON_A_GPU <= set(calls)


@pytest.mark.parametrize("affine", [(True, True), (False, False), (False, True), (True, False)])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_calls_of_a_batch_norm_are_accepted_by_cuda(kind: torch.dtype, affine: tuple[bool, bool]) -> None:
    x, dy = torch.randn(2, 2, 4, 6, 5).to(kind)
    weight, bias = (torch.rand(4) if has else None for has in affine)
    for norm in (BatchNorm(60, 1e-5), FusedBatchNorm(24, 1e-5, owned=Box(1, 5, 1, 4))):
        with CheckedCalls():
            _, saved = waited(norm.forward(AloneCommunicator(), (x, weight, bias)))  # type: ignore[arg-type]
            waited(norm.backward(AloneCommunicator(), saved, (dy.contiguous(memory_format=torch.channels_last),)))


@pytest.mark.parametrize("over", [True, False])
def test_a_pool_of_swapped_rows_and_columns_is_accepted_by_cuda(over: bool) -> None:
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64).transpose(2, 3)
    leaf = x.clone().requires_grad_()
    dy = torch.randn(2, 3, 3, 4, dtype=torch.float64)
    F.max_pool2d(leaf, 2).backward(dy)
    with CheckedCalls():
        pool = WholeMaxPool(Window(AxisWindow(2, 2, 0), AxisWindow(2, 2, 0)), overwrites_map=over)
        _, saved = pool.forward((x.clone(),))
        found = pool.backward(saved, (dy,))[0]
    assert found is not None and leaf.grad is not None and torch.equal(found, leaf.grad)


def test_convolutions_and_pools_that_are_wrong_are_named() -> None:
    compared = ComparedCalls()
    with as_on_a_gpu():
        step(PLANS["columns"], torch.bfloat16, "cpu", torch.channels_last, compared)
    assert compared.wrong == []
    other = {"aten.avg_pool2d_backward.grad_input": lambda dy, x, *settings: torch.ones_like(x)}
    with as_on_a_gpu(), mock.patch.dict(cuda_kernels._COMPARED, other):  # type: ignore[arg-type]
        step(PLANS["columns"], torch.bfloat16, "cpu", torch.channels_last, compared)
    assert compared.wrong and all("avg_pool2d_backward" in line for line in compared.wrong)


def test_the_table_has_every_operator_that_is_called_by_name() -> None:
    sources = Path(hyfi_core.__file__).parent.rglob("*.py")
    named = (
        r"ops\.aten\.(\w+)|((?:native_)?batch_norm\w*|native_\w+|_foreach_\w+)\(|(\w+)\((?:[^()=]|\([^()]*\))*, out="
    )
    calls = re.compile(rf"torch\.(?:{named})")
    decomposed = {"diff", "rot90"}  # at capture: never called
    found = {name for source in sources for pair in calls.findall(source.read_text()) for name in pair if name}
    assert found - decomposed == {name.partition(".")[0] for name in KERNELS}


@pytest.mark.cuda
@pytest.mark.parametrize("plan", sorted(PLANS))
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_on_a_gpu_equal_float64_on_a_cpu(kind: torch.dtype, order: torch.memory_format, plan: str) -> None:
    found, _ = step(PLANS[plan], kind, "cuda", order)
    wanted = reference()
    everything = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    errors = {name: (found[name].cpu().double() - gradient).norm() for name, gradient in wanted.items()}
    wrong = [
        name
        for name, gradient in wanted.items()
        if errors[name] > TOLERANCES[kind] * max(gradient.norm(), 0.1 * everything)
    ]
    if wrong:  # said with the calls that are, so that one run on a GPU is enough
        compared = ComparedCalls()
        step(PLANS[plan], kind, "cuda", order, compared)
        raise AssertionError(f"gradients {wrong} are wrong; calls that are:\n" + "\n".join(compared.wrong))


@pytest.mark.cuda
@pytest.mark.parametrize("affine", [(True, True), (False, False), (False, True), (True, False)])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_by_known_statistics_equals_the_native_one_on_a_gpu(
    kind: torch.dtype, order: torch.memory_format, affine: tuple[bool, bool]
) -> None:
    wide = torch.promote_types(kind, torch.float32)
    x = torch.randn(2, 8, 33, 21, device="cuda").mul_(3).add_(5).to(kind, memory_format=order).requires_grad_()
    weight, bias = (torch.rand(8, device="cuda").to(wide).requires_grad_() if has else None for has in affine)
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    dy = torch.randn_like(x)
    # Not cuDNN's, which the native kernel equals only to rounding.
    with torch.backends.cudnn.flags(enabled=False):
        # By a weight in any case: the native kernel returns no sum for a bias alone.
        scale = torch.ones(8, device="cuda", dtype=wide) if weight is None else weight
        plain, mean, inverse = torch.native_batch_norm(x, scale, bias, None, None, True, 0.0, 1e-5)
        wanted = torch.autograd.grad(plain, given, dy)
    with CheckedCalls() as checked:
        found = KnownStatistics.apply(x, weight, bias, mean.detach(), inverse.detach())
    assert checked.calls["batch_norm_elemt.default"] == 1
    assert torch.equal(found, plain) and found.stride() == plain.stride()
    for one, other in zip(torch.autograd.grad(found, given, dy), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCES[kind] / 10, atol=TOLERANCES[kind] / 10)
