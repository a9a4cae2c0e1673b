"""Mean pools of parts: inner outputs apart and everything on one canvas equal one process, whatever counts."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.ops.avg_pool import AvgPool
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan import Layout, plan_transfer
from hyfi_core.plan.window import AxisWindow, Window
from hyfi_core.rules.instructions import CollectiveCall
from tests.fake_gpu import FakeGpu
from tests.harness import assert_equal_to_one_process, captured_once

Pair = tuple[int, int]


def pools(
    size: Pair, outputs: Pair, grid: Pair, pool: nn.AvgPool2d, apart: bool
) -> tuple[Layout, Layout, list[AvgPool]]:
    """Return how input and output are laid out, and the pool of each rank."""
    (ky, kx), (sy, sx), (py, px) = pool.kernel_size, pool.stride, pool.padding
    window = Window(AxisWindow(ky, sy, py), AxisWindow(kx, sx, px))
    have = Layout.even(*size, grid)
    out = have.through(window, *outputs)
    need = [window.input_box(part) for part in out.parts]
    halos = [Redistribute(plan_transfer(have.parts, need, have.map, rank)) for rank in range(len(need))]
    return (
        have,
        out,
        [
            AvgPool(halo, window, part, (0, 0), apart, pool.count_include_pad, pool.divisor_override)
            for halo, part in zip(halos, out.parts, strict=True)
        ],
    )


def check(size: Pair, grid: Pair, pool: nn.AvgPool2d, order: torch.memory_format, given_back: bool = True) -> int:
    """Hold both ways against one process; return how many ranks computed their inner outputs apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 3, *size), generator=generator, dtype=torch.float64).contiguous(memory_format=order)
    leaf = x.clone().requires_grad_()
    wanted = pool(leaf)
    dy = torch.randn(wanted.shape, dtype=torch.float64, generator=generator) * given_back
    wanted.backward(dy)
    assert leaf.grad is not None
    count = 0
    for apart in (True, False):
        have, out, ops = pools(size, wanted.shape[2:], grid, pool, apart)

        def body(comm: Communicator, ops: Any = ops, have: Layout = have, out: Layout = out) -> Any:
            mine, theirs = have.parts[comm.rank].slices(), out.parts[comm.rank].slices()
            own = x[:, :, *mine].contiguous(memory_format=order)
            (found,), saved = waited(ops[comm.rank].forward(comm, (own,)))
            tensors = [item for item in saved if isinstance(item, torch.Tensor)]
            assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) < 100
            cotangent = dy[:, :, *theirs].clone() if given_back else None
            kept = None if cotangent is None else cotangent.clone()
            back = waited(ops[comm.rank].backward(comm, saved, (cotangent,)))[0]
            assert kept is None or torch.equal(kept, cotangent)
            return found, back, own.stride()

        for rank, (found, back, strides) in enumerate(run_ranks(len(ops), body, strict=True)):
            torch.testing.assert_close(found, wanted[:, :, *out.parts[rank].slices()], rtol=0, atol=1e-14)
            torch.testing.assert_close(back, leaf.grad[:, :, *have.parts[rank].slices()], rtol=0, atol=1e-14)
            assert ops[rank].own is None or back.stride() == strides
        count += sum(op.own is not None for op in ops)
    return count


def made(kernel: Pair, stride: Pair, padding: Pair, **more: Any) -> nn.AvgPool2d:
    return nn.AvgPool2d(kernel, stride, padding, **more)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("include_pad", [True, False])
def test_inner_outputs_apart_and_one_canvas_equal_one_process(order: torch.memory_format, include_pad: bool) -> None:
    assert check((32, 36), (2, 2), made((3, 3), (2, 2), (1, 1), count_include_pad=include_pad), order) == 4
    assert check((31, 34), (1, 2), made((3, 3), (1, 1), (1, 1), count_include_pad=include_pad), order) == 2
    assert check((31, 34), (2, 1), made((3, 5), (1, 2), (1, 2), divisor_override=7), order) == 2


def test_a_cotangent_that_nobody_computed_is_zero() -> None:
    assert check((32, 36), (2, 2), made((3, 3), (1, 1), (1, 1)), torch.contiguous_format, given_back=False) == 4
    assert check((5, 4), (3, 3), made((2, 2), (2, 2), (1, 1)), torch.contiguous_format, given_back=False) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_setting_equals_one_process(data: st.DataObject) -> None:
    kernel = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    check(
        (data.draw(st.integers(4, 25)), data.draw(st.integers(4, 25))),
        data.draw(st.sampled_from([(1, 2), (2, 2), (3, 1), (3, 3)])),
        made(
            kernel,
            (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))),
            (data.draw(st.integers(0, kernel[0] // 2)), data.draw(st.integers(0, kernel[1] // 2))),
            ceil_mode=data.draw(st.booleans()),
            count_include_pad=data.draw(st.booleans()),
            divisor_override=data.draw(st.sampled_from([None, 1, 3, -2])),
        ),
        data.draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
    )


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 3])
def test_inner_outputs_with_padding_equal_one_process_on_a_gpu(order: torch.memory_format, channels: int) -> None:
    """CUDA's kernel forgets the padding of channels-last maps."""
    _, out, ops = pools((32, 36), (32, 36), (1, 2), made((3, 3), (1, 1), (1, 1)), True)
    x = torch.randn(2, channels, 32, 36, dtype=torch.float64).requires_grad_()
    dy = torch.randn(2, channels, 32, 36, dtype=torch.float64)
    F.avg_pool2d(x, 3, 1, 1).backward(dy)
    assert x.grad is not None and ops[0].own is not None and any(ops[0].own.padding)
    with FakeGpu():

        def body(comm: Communicator) -> Any:
            have, part = ops[comm.rank].halo.transfer.have.slices(), out.parts[comm.rank].slices()
            own = x.detach()[:, :, *have].to("cuda").clone(memory_format=order)
            _, saved = waited(ops[comm.rank].forward(comm, (own,)))
            back = waited(ops[comm.rank].backward(comm, saved, (dy[:, :, *part].to("cuda"),)))[0]
            assert back is not None
            return back.cpu()

        found = torch.cat(run_ranks(2, body), 3)
    torch.testing.assert_close(found, x.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("channels", [1, 4])
def test_padded_pools_of_one_rank_on_a_gpu_equal_the_cpu(channels: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, channels, 3, padding=1), nn.AvgPool2d(3, 1, 1), nn.ReLU(), nn.Conv2d(channels, 2, 3)),
        *(nn.AvgPool2d((3, 5), 2, (0, 2), count_include_pad=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ).to(torch.float64, memory_format=torch.channels_last)
    shape, labels, reference = (2, 3, 16, 18), torch.tensor([0, 1]), copy.deepcopy(model)
    images = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    captured_once(model, shape, torch.float64)  # export knows only real devices
    F.cross_entropy(reference(images), labels).backward()
    with FakeGpu():
        plan = hyfi_core.ParallelPlan(grids=((1, 1),))
        engine = hyfi_core.parallelize(model.to("cuda"), shape, plan, AloneCommunicator(), verify=False)
        engine.accumulate(images, labels)
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-11)


class Pools(nn.Sequential):
    """Pools of all kinds between convolutions, which have halos of their own."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.AvgPool2d(3, 1, 1),
            nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
            nn.BatchNorm2d(4),
            nn.AvgPool2d((2, 3), 1, (1, 0), divisor_override=5),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        )


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)])
def test_a_model_with_pools_equals_one_process_with_the_same_messages(grid: Pair) -> None:
    model, shape = Pools(), (1, 3, 45, 50)
    ours = assert_equal_to_one_process(copy.deepcopy(model), shape, grid, fused_halo=1)
    with mock.patch("hyfi_core.rules.windows.sliding.try_overlapped_avg_pool", lambda *_: False):
        plain = assert_equal_to_one_process(copy.deepcopy(model), shape, grid, fused_halo=1)
    assert [rank["halo"] for rank in ours.traffic] == [rank["halo"] for rank in plain.traffic]
    assert all(rank["halo"]["messages"] > 0 for rank in ours.traffic)
    program = captured_once(model.double(), shape, torch.float64)
    emitted = [
        step.operator
        for step in lower(program, Target(grid, 0)).instructions
        if isinstance(step, CollectiveCall) and isinstance(step.operator, AvgPool)
    ]
    assert len(emitted) == 3 and emitted[0].own is not None


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_padding_that_hangs_over_the_end_never_counts(ceil_mode: bool) -> None:
    pool = made((3, 3), (2, 2), (1, 1), ceil_mode=ceil_mode)
    x = torch.ones(1, 1, 6, 6)
    have, _, ops = pools((6, 6), pool(x).shape[2:], (1, 2), pool, True)
    found = run_ranks(2, lambda c: waited(ops[c.rank].forward(c, (x[:, :, *have.parts[c.rank].slices()],)))[0][0])
    assert torch.equal(torch.cat(found, 3), F.avg_pool2d(x, 3, 2, 1, ceil_mode=ceil_mode))


def test_a_window_far_larger_than_the_map_is_a_mean() -> None:
    torch.manual_seed(0)
    pool = nn.AvgPool2d(40_000, ceil_mode=True)  # as a network has it that is meant for any image
    net = nn.Sequential(nn.Conv2d(3, 4, 3), pool, nn.Flatten(), nn.Linear(4, 2))
    assert_equal_to_one_process(net, (2, 3, 12, 9), (2, 2))


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("include_pad", [True, False])
def test_a_mean_of_16_bits_is_finite_where_the_sum_over_a_window_would_not_be(
    overlapped: bool, include_pad: bool
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 2, 1, bias=False),
        nn.AvgPool2d(12, 4, 2, count_include_pad=include_pad),
        nn.Flatten(2),
        nn.AvgPool1d(99, 1, 49, count_include_pad=include_pad),
    ).requires_grad_(False)
    model[0].weight.fill_(1.0)
    images = torch.linspace(390, 400, 256 * 256).view(1, 1, 256, 256).repeat(1, 3, 1, 1)
    with torch.autocast("cpu", torch.float16):
        wanted = model(images)
    assert wanted.dtype == torch.float16 and wanted.isfinite().all()

    def body(comm: Communicator) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((2, 2),))
        engine = hyfi_core.parallelize(copy.deepcopy(model), images.shape, plan, comm, autocast=torch.float16)
        return engine.predict(images)

    path = "hyfi_core.rules.windows.sliding.try_overlapped_avg_pool"
    with contextlib.nullcontext() if overlapped else mock.patch(path, lambda *_: False):
        for found in run_ranks(4, body):
            torch.testing.assert_close(found, wanted, rtol=4e-3, atol=0)
