"""Batch norm over ranks: far from zero, in 16 bits, and where a rank owns nothing."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.ops.norms import batch_norm
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.ops.norms.known_statistics import KnownStatistics
from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes, return_freed_now
from tests.fake_gpu import FakeGpu, batch_norm_backward_elemt
from tests.harness import assert_equal_to_one_process, captured_once, run_copies

ROWS = (0, 3, 3, 7)  # the second rank owns nothing


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5, -1e7])
def test_statistics_do_not_cancel_far_from_zero(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 7, 5, dtype=torch.float64, generator=generator) + offset

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        own = x[:, :, ROWS[comm.rank] : ROWS[comm.rank + 1]].contiguous()
        (_, mean, variance), _ = waited(BatchNorm(70, 1e-5).forward(comm, (own, None, None)))  # type: ignore[arg-type]
        return mean, variance

    mean = x.mean((0, 2, 3))
    variance = (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3))
    for found in run_ranks(3, body):
        torch.testing.assert_close(found[0], mean, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(found[1], variance, rtol=1e-8 * 1e-2 if abs(offset) < 1e6 else 1e-8, atol=0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_model_of_16_bits_trains_on_several_ranks(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ).to(kind)
    images, labels = torch.randn(2, 3, 12, 10).to(kind), torch.tensor([0, 1])

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (2, 3, 12, 10), hyfi_core.ParallelPlan(grids=((1, 2),)), comm)
        return engine.accumulate(images, labels), engine.gather_gradients()

    loss, gradients = run_copies(model, 2, body)[0]
    exact = copy.deepcopy(model).double()
    wanted = F.cross_entropy(exact(images.double()), labels)
    wanted.backward()
    assert abs(loss - float(wanted)) < 0.02
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        assert gradients[name].dtype == kind
        assert float((gradients[name].double() - parameter.grad).norm()) < 0.05 * max(
            float(parameter.grad.norm()), 0.1
        ), name


class Shifted(nn.Module):
    """A batch norm of values far from zero; its convolution's gradients come through what is left of them."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def extra_repr(self) -> str:
        return str(self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.norm(self.conv(x) + self.offset)).mean((2, 3)))


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_gradients_far_from_zero_equal_one_process(offset: float) -> None:
    torch.manual_seed(0)
    tolerance = max(1e-10, 1e-14 * offset)  # the map itself is rounded to 1e-16 of its values
    assert_equal_to_one_process(Shifted(offset), (2, 3, 12, 10), (2, 2), tolerance=tolerance)


class TwoNorms(Shifted):
    """The same before another norm: gradients of the first bias cancel."""

    def __init__(self, offset: float) -> None:
        super().__init__(offset)
        self.last, self.last_norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x) + self.offset))
        return self.fc(F.relu(self.last_norm(self.last(x))).mean((2, 3)))


def in_float32(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels)


@pytest.mark.parametrize("offset", [0.0, 3.0, 30.0])
def test_gradients_in_bfloat16_are_as_exact_as_those_of_plain_autocast(offset: float) -> None:
    """With statistics of 16 bits, or terms rounded one by one, errors on several ranks were up to 20 times as large."""
    torch.manual_seed(0)
    model, images, labels = TwoNorms(offset), torch.randn(2, 3, 36, 40), torch.tensor([0, 1])
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    F.cross_entropy(exact(images.double()), labels).backward()
    with torch.autocast("cpu", torch.bfloat16):
        logits = plain(images)
    in_float32(logits, labels).backward()
    wanted = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    everything = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()

    def errors(found: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: float((found[name].double() - gradient).norm()) for name, gradient in wanted.items()}

    allowed = errors({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})

    def body(plan: hyfi_core.ParallelPlan, comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(
            module, (2, 3, 36, 40), plan, comm, loss=in_float32, autocast=torch.bfloat16, verify=False
        )
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    for plan in (
        hyfi_core.ParallelPlan(grids=((2, 2),), fused_halo=1),
        hyfi_core.ParallelPlan(grids=((1, 2),), fused_halo=8),
        hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2)),
    ):
        found = errors(run_copies(model, plan.ranks, partial(body, plan))[0])
        for name, error in found.items():
            assert error <= 1.3 * allowed[name] + 1e-3 * everything, (plan.grids, plan.cells, name)


class NormedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.fc = nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.fc(F.relu(self.norm(self.second(x))).mean((2, 3)))


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_a_norm_that_is_called_twice(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(NormedTwice(), (2, 3, 12, 10), grid)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_batch_norm_gives_the_same_numbers_in_place(kind: torch.dtype) -> None:
    x, dy = torch.randn(2, 3, 5, 6).to(kind), torch.randn(2, 3, 5, 6).to(kind)
    weight = torch.rand(3).to(torch.promote_types(kind, torch.float32))
    _, saved = waited(BatchNorm(2 * 5 * 6, 1e-5).forward(AloneCommunicator(), (x, weight, weight)))
    given = (dy.clone(),)
    place = given[0].data_ptr()
    apart = waited(BatchNorm(2 * 5 * 6, 1e-5).backward(AloneCommunicator(), saved, given))
    assert apart[0] is not None and apart[0].data_ptr() != place and torch.equal(given[0], dy)
    over = waited(BatchNorm(2 * 5 * 6, 1e-5, overwrites_cotangent=True).backward(AloneCommunicator(), saved, given))
    assert over[0] is not None and over[0].data_ptr() == place
    for ours, theirs in zip(over, apart, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("affine", [(True, True), (False, False), (False, True), (True, False)])
@pytest.mark.parametrize("shape", [(2, 8, 13, 11), (2, 8, 1, 11), (2, 8, 17), (6, 8)])
@pytest.mark.parametrize(
    ("kind", "of_weights"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_norm_by_known_statistics_has_the_bits_of_the_first(
    kind: torch.dtype, of_weights: torch.dtype, shape: tuple[int, ...], affine: tuple[bool, bool]
) -> None:
    torch.manual_seed(0)
    for order in (torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])):
        x = torch.randn(shape).mul_(3).add_(40).to(kind, memory_format=order).requires_grad_()
        weight, bias = (torch.rand(8).to(of_weights).requires_grad_() if has else None for has in affine)
        given = [tensor for tensor in (x, weight, bias) if tensor is not None]
        running = torch.zeros(8, dtype=of_weights), torch.ones(8, dtype=of_weights)
        plain, mean, inverse = torch.native_batch_norm(x, weight, bias, *running, True, 0.1, 1e-5)
        again = KnownStatistics.apply(x, weight, bias, mean.detach(), inverse.detach())
        assert torch.equal(again, plain) and again.stride() == plain.stride()
        dy = torch.randn(shape).to(kind, memory_format=order)
        gradients = (torch.autograd.grad(result, given, dy) for result in (again, plain))
        for one, other in zip(*gradients, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("overwrites", [True, False])
def test_gradients_of_16_bit_maps_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch, overwrites: bool) -> None:
    """Torch widens whole operands on a CPU: that took six times the memory of the map."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 1, 16, 1024, 256, generator=generator).to(torch.bfloat16)
    x, dy = (one.to(memory_format=torch.channels_last) for one in maps)
    scales = torch.rand(16, generator=generator), torch.zeros(16)
    operator = BatchNorm(x.numel() // 16, 1e-5, overwrites_cotangent=overwrites)
    _, saved = waited(operator.forward(AloneCommunicator(), (x, *scales)))

    def gradient(block: int) -> tuple[torch.Tensor, int]:
        monkeypatch.setattr(batch_norm, "_BLOCK_VALUES", block)
        _, finish = operator.start_backward(AloneCommunicator(), saved, (dy.clone(), None, None))
        return_freed_now()
        forget_peak()
        before = resident_bytes()
        found = finish()[0]
        assert found is not None
        return found, peak_bytes() - before

    whole, needed = gradient(x.numel())
    assert needed > 3 * x.nbytes  # the test can see it
    for rows in (1, 30):
        found, needed = gradient(rows * x.numel() // 1024)
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
        assert needed < 2 * x.nbytes


@pytest.mark.parametrize("of_map", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_cotangent", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weighted", [True, False])
def test_what_the_kernel_of_cuda_takes_gives_the_same_cotangent(
    monkeypatch: Any, weighted: bool, of_cotangent: torch.memory_format, of_map: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 4, 7, 5, dtype=torch.float64, generator=generator) + 3 for _ in range(2))
    weight = torch.randn(4, dtype=torch.float64, generator=generator) if weighted else None

    def body(comm: Communicator) -> Any:
        rows = slice(ROWS[comm.rank], ROWS[comm.rank + 1])
        own = x[:, :, rows].contiguous(memory_format=of_map)
        cotangent = dy[:, :, rows].contiguous(memory_format=of_cotangent)
        norm = BatchNorm(70, 1e-5)
        _, saved = waited(norm.forward(comm, (own, weight, None)))  # type: ignore[arg-type]
        return waited(norm.backward(comm, saved, (cotangent,)))

    expected = run_ranks(3, body)
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", batch_norm_backward_elemt)
    monkeypatch.setattr(BatchNorm, "_uses_kernel", lambda self, own: True)
    monkeypatch.setattr(batch_norm, "_MOST_PIXELS", 32)  # three numbers for 70 pixels
    for ours, theirs in zip(run_ranks(3, body), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "x",
    [random(3, 2, 4, 5)[:, :1], random(3, 4, 5, 2).permute(0, 3, 1, 2)[:, 1:], random(3, 6).mT],
    ids=["a channel", "a channel, channels-last", "features"],
)
def test_the_kernel_of_cuda_takes_no_map_with_gaps(monkeypatch: Any, x: torch.Tensor) -> None:
    """Its cotangent, dense, is in both formats at once."""
    dy = random(*x.shape)

    def back() -> Any:
        norm = BatchNorm(x.numel() // x.shape[1], 1e-5)
        _, saved = waited(norm.forward(AloneCommunicator(), (x, None, None)))  # type: ignore[arg-type]
        return waited(norm.backward(AloneCommunicator(), saved, (dy, None, None)))

    assert not x.is_contiguous()
    expected = back()
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", batch_norm_backward_elemt)
    monkeypatch.setattr(BatchNorm, "_uses_kernel", lambda self, own: True)
    torch.testing.assert_close(back(), expected, rtol=1e-12, atol=1e-12)


def test_the_kernel_of_cuda_takes_volumes_in_one_format(monkeypatch: Any) -> None:
    """Of five dims, as an encoder of tiles may have them."""
    maps = random(2, 2, 4, 3, 5, 2)
    orders = torch.contiguous_format, torch.channels_last_3d

    def back(of_map: torch.memory_format, of_cotangent: torch.memory_format) -> Any:
        x, dy = maps[0].contiguous(memory_format=of_map), maps[1].contiguous(memory_format=of_cotangent)
        _, saved = waited(BatchNorm(60, 1e-5).forward(AloneCommunicator(), (x, None, None)))  # type: ignore[arg-type]
        return waited(BatchNorm(60, 1e-5).backward(AloneCommunicator(), saved, (dy, None, None)))

    expected = back(orders[0], orders[0])
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", batch_norm_backward_elemt)
    monkeypatch.setattr(BatchNorm, "_uses_kernel", lambda self, own: True)
    for formats in product(orders, orders):
        torch.testing.assert_close(back(*formats), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("side", "settings"),
    [(16, {"cells": (3, 3)}), (40, {"cells": (2, 2), "fused_halo": 2})],
    ids=["a cell is empty", "margins of a fused run"],
)
def test_cells_of_a_gpu_without_pixels_or_with_margins_equal_one_process(side: int, settings: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4)),
        *(nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ).double()
    shape, labels = (2, 3, side, side), torch.tensor([0, 3])
    images, reference = torch.randn(shape, dtype=torch.float64), copy.deepcopy(model)
    captured_once(model, shape, torch.float64)  # export knows only real devices
    F.cross_entropy(reference(images), labels).backward()
    with FakeGpu():
        plan = hyfi_core.ParallelPlan(grids=((1, 1),), **settings)
        engine = hyfi_core.parallelize(model.to("cuda"), shape, plan, AloneCommunicator(), verify=False)
        engine.accumulate(images, labels)
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-11)
