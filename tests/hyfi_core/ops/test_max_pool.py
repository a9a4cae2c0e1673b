"""Maximum pools of parts: inner outputs apart and everything on one canvas equal one process, ties included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.cells.recomputation import tensors_in
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.ops.max_pool import MaxPool, WholeMaxPool
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan import Layout, plan_transfer
from hyfi_core.plan.window import AxisWindow, Window


def check(
    size: Any, grid: Any, kernel: int, stride: int, padding: int, order: torch.memory_format, dilation: int = 1
) -> int:
    """Hold both ways against one process; return how many ranks computed their inner outputs apart."""
    # Few different values: most windows have ties, and the first in the window gets the gradient.
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (2, 3, *size), generator=generator).double().contiguous(memory_format=order)
    leaf = x.clone().requires_grad_()
    wanted = F.max_pool2d(leaf, kernel, stride, padding, dilation)
    dy = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    wanted.backward(dy)
    axis = AxisWindow(kernel, stride, padding, dilation)
    window = Window(axis, axis)
    have = Layout.even(*size, grid)
    out = have.through(window, *wanted.shape[2:])
    need = [window.input_box(part) for part in out.parts]
    count = 0
    for apart in (True, False):
        ops = [
            MaxPool(
                Redistribute(plan_transfer(have.parts, need, have.map, rank), fill=-torch.inf),
                window,
                part,
                (0, 0),
                apart,
            )
            for rank, part in enumerate(out.parts)
        ]

        def body(comm: Communicator, ops: list[MaxPool] = ops) -> Any:
            mine, theirs = have.parts[comm.rank].slices(), out.parts[comm.rank].slices()
            own = x[:, :, *mine].contiguous(memory_format=order)
            (found,), saved = waited(ops[comm.rank].forward(comm, (own,)))
            back = waited(ops[comm.rank].backward(comm, saved, (dy[:, :, *theirs],)))[0]
            check_remade(comm, ops[comm.rank], own, dy[:, :, *theirs], back)
            (unused,) = waited(ops[comm.rank].backward(comm, saved, (None,)))
            assert unused is not None and unused.shape == own.shape and not unused.any()
            return found, back

        for rank, (found, back) in enumerate(run_ranks(len(ops), body, strict=True)):
            assert torch.equal(found, wanted[:, :, *out.parts[rank].slices()])
            assert leaf.grad is not None
            torch.testing.assert_close(back, leaf.grad[:, :, *have.parts[rank].slices()], rtol=0, atol=1e-13)
        count += sum(op.own is not None for op in ops)
    return count


def check_remade(comm: Communicator, op: MaxPool, own: torch.Tensor, dy: torch.Tensor, wanted: Any) -> None:
    """The input gives the indices again, and they give the same cotangent, in a byte or as PyTorch returns them."""
    wide = replace(op, holds_map=False)
    _, saved = waited(wide.forward(comm, (own,)))
    # Only shapes of maps are saved, without memory.
    assert not any(one.is_floating_point() and one.untyped_storage().nbytes() for one in tensors_in(saved))
    remade = wide.remade(saved)
    needs_strips = op.own is None and bool(op.halo.transfer.receives)
    assert (remade is None) == (needs_strips or op.output.empty)
    if remade is not None:
        assert remade.dtype == torch.int64 and torch.equal(remade, wide.remake(own.clone()))
        assert torch.equal(saved[1 if op.own is not None else 2], remade)
    for kept in (saved, wide.compact(saved)):
        assert torch.equal(waited(wide.backward(comm, kept, (dy,)))[0], wanted)  # type: ignore[arg-type]
    narrow = wide.compact(saved)[1 if op.own is not None else 2]
    assert op.output.empty or narrow.dtype == torch.uint8 or own.shape[3] <= op.window.x.kernel


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_inner_outputs_apart_and_one_canvas_equal_one_process(order: torch.memory_format) -> None:
    assert check((32, 36), (2, 2), 3, 2, 1, order) == 4
    assert check((30, 34), (1, 2), 3, 1, 1, order) == 2
    # The native call pads by half a window at most, and the middle rank would need more.
    assert check((49, 12), (3, 1), 3, 1, 1, order, dilation=2) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_setting_equals_one_process(data: st.DataObject) -> None:
    kernel = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(6, 25)), data.draw(st.integers(6, 25))
    grid = data.draw(st.sampled_from([(1, 2), (2, 2), (3, 1), (3, 3)]))
    check(
        size,
        grid,
        kernel,
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(0, kernel // 2)),
        torch.contiguous_format,
    )


@pytest.mark.parametrize("over", [False, True])
def test_a_pool_of_a_whole_map_equals_autograd(over: bool) -> None:
    window = Window(AxisWindow(3, 2, 1), AxisWindow(2, 1, 0))
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (2, 3, 7, 9), generator=generator).double().requires_grad_()
    wanted = F.max_pool2d(x, (3, 2), (2, 1), (1, 0))
    dy = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    wanted.backward(dy)
    for cotangent in (dy, None):
        image = x.detach().clone()
        (found,), saved = WholeMaxPool(window, over).forward((image,))
        (back,) = WholeMaxPool(window, over).backward(saved, (cotangent,))
        assert torch.equal(found, wanted) and back is not None and (back.data_ptr() == image.data_ptr()) == over
        torch.testing.assert_close(back, x.grad if cotangent is not None else torch.zeros_like(x), rtol=0, atol=1e-13)
