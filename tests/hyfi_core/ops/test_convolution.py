"""Convolution of parts: own part and strips apart equal the canvas, and both equal one process."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.ops.convolution import Convolution, is_sparse
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan import Box, Layout, plan_transfer
from hyfi_core.plan.window import AxisWindow, Window

Settings = dict[str, Any]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operators(
    size: tuple[int, int], grid: tuple[int, int], how: Settings, apart: bool, keeps_canvas: bool = True
) -> tuple[Layout, Layout, list]:
    """Return the layouts of input and output, and every rank's operator."""
    axes = zip(how["kernel"], how["stride"], how["padding"], how["dilation"], strict=True)
    window = Window(*(AxisWindow(*axis) for axis in axes))
    have = Layout.even(*size, grid)
    sides = [(n + 2 * w.padding - w.extent) // w.stride + 1 for n, w in zip(size, (window.y, window.x), strict=True)]
    out = have.through(window, *sides)
    native = tuple(w.padding if ranks == 1 else 0 for w, ranks in zip((window.y, window.x), grid, strict=True))
    need = []
    for part in out.parts:
        box = window.input_box(part)
        y = (0, size[0]) if grid[0] == 1 and not box.empty else (box.y0, box.y1)
        x = (0, size[1]) if grid[1] == 1 and not box.empty else (box.x0, box.x1)
        need.append(Box(*y, *x))
    ops = []
    for rank, part in enumerate(out.parts):
        halo = Redistribute(plan_transfer(have.parts, need, have.map, rank))
        ops.append(Convolution(halo, window, part, native, how["groups"], apart, keeps_canvas))
    return have, out, ops


def in_parts(x: torch.Tensor, w: torch.Tensor, b: Any, y: torch.Tensor, grid: Any, how: Settings, *mode: bool) -> Any:
    """Return (output, cotangents of map, weight and bias, how many ranks worked apart), put together."""
    have, out, ops = operators((x.shape[2], x.shape[3]), grid, how, *mode)
    order = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format

    def body(comm: Communicator) -> Any:
        op, mine, theirs = ops[comm.rank], have.parts[comm.rank].slices(), out.parts[comm.rank].slices()
        inputs = (x[:, :, *mine].contiguous(memory_format=order), w, b)
        outputs, saved = waited(op.forward(comm, inputs))
        assert torch.equal(op.recompute(inputs, saved), outputs[0])
        return outputs[0], waited(op.backward(comm, saved, (y[:, :, *theirs],), (True, True, b is not None)))

    result, back = torch.zeros_like(y), torch.zeros_like(x)
    d_weight, d_bias = torch.zeros_like(w), torch.zeros(w.shape[0], dtype=w.dtype)
    for rank, (part, cotangents) in enumerate(run_ranks(len(ops), body, strict=True)):
        assert part.shape[2:] == out.parts[rank].shape and cotangents[0].dtype == x.dtype
        result[:, :, *out.parts[rank].slices()] = part
        back[:, :, *have.parts[rank].slices()] = cotangents[0]
        for total, share in ((d_weight, cotangents[1]), (d_bias, cotangents[2])):
            if share is not None:
                total += share
    return result, back, d_weight, d_bias, sum(op.own is not None for op in ops)


def whole(x: torch.Tensor, w: torch.Tensor, b: Any, how: Settings) -> torch.Tensor:
    return F.conv2d(x, w, b, how["stride"], how["padding"], how["dilation"], how["groups"])


def in_one(x: torch.Tensor, w: torch.Tensor, b: Any, y: torch.Tensor, how: Settings) -> Any:
    leaves = [t.clone().requires_grad_() for t in (x, w, b) if t is not None]
    found = F.conv2d(
        *leaves, *([None] if b is None else []), how["stride"], how["padding"], how["dilation"], how["groups"]
    )
    found.backward(y)
    return found.detach(), *(leaf.grad for leaf in leaves)


def check(size: tuple[int, int], grid: tuple[int, int], how: Settings, batch: int = 2, bias: bool = True) -> int:
    """Hold both ways against one process; return how many ranks worked apart."""
    how = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1} | how
    x = noise(batch, 4, *size, seed=1).contiguous(
        memory_format=torch.channels_last if batch > 1 else torch.preserve_format
    )
    w, b = noise(6, 4 // how["groups"], *how["kernel"], seed=2), noise(6, seed=3) if bias else None
    if batch > 1:  # strips then go tap by tap
        w = w.contiguous(memory_format=torch.channels_last)
    y = noise(*whole(x, w, b, how).shape, seed=4)
    wanted = in_one(x, w, b, y, how)
    apart = 0
    for works_apart, keeps_canvas in ((True, True), (False, True), (False, False)):
        *found, count = in_parts(x, w, b, y, grid, how, works_apart, keeps_canvas)
        for ours, theirs in zip(found, wanted, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        assert works_apart or count == 0
        apart += count
    return apart


@pytest.mark.parametrize(
    ("size", "grid", "how", "apart"),
    [
        ((16, 18), (1, 2), {"kernel": (3, 3), "padding": (1, 1)}, 2),
        ((18, 16), (2, 2), {"kernel": (3, 3), "padding": (1, 1), "groups": 2}, 4),
        ((32, 32), (2, 2), {"kernel": (3, 3), "padding": (1, 1), "stride": (2, 2)}, 4),
        ((40, 36), (2, 2), {"kernel": (7, 7), "padding": (3, 3), "stride": (2, 2)}, None),
        ((17, 23), (2, 2), {"kernel": (1, 1), "stride": (2, 2)}, 4),
        ((60, 90), (2, 3), {"kernel": (3, 3), "padding": (2, 2), "dilation": (2, 2)}, 6),
        ((20, 30), (2, 2), {"kernel": (1, 7), "padding": (0, 3)}, 4),
        ((60, 20), (3, 1), {"kernel": (5, 3), "padding": (2, 1)}, 3),
        ((5, 7), (3, 3), {"kernel": (5, 5), "padding": (2, 2)}, 0),  # parts smaller than the halo
        ((4, 5), (3, 3), {"kernel": (3, 3), "padding": (1, 1), "stride": (2, 2)}, None),  # some own nothing
    ],
)
def test_apart_and_on_any_canvas_equal_one_process(size: Any, grid: Any, how: Settings, apart: int | None) -> None:
    found = check(size, grid, how)
    assert apart is None or found == apart


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_setting_equals_one_process(data: st.DataObject) -> None:
    both = lambda low, high: (data.draw(st.integers(low, high)), data.draw(st.integers(low, high)))  # noqa: E731
    grid = data.draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 3), (3, 2)]))
    how = {"kernel": both(1, 5), "stride": both(1, 3), "padding": both(0, 3), "dilation": both(1, 2)}
    how["groups"] = data.draw(st.sampled_from([1, 2]))
    size = both(9, 34)
    check(size, grid, how, batch=data.draw(st.integers(1, 2)), bias=data.draw(st.booleans()))


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1)])
def test_padding_in_memory_as_on_gpus_equals_one_process(grid: tuple[int, int]) -> None:
    """There, calls with a stride and a dilation get maps that are padded already."""
    how = {"kernel": (3, 5), "padding": (2, 3), "stride": (2, 3), "dilation": (2, 1)}
    padded = mock.patch.object(
        Convolution, "_pads", lambda self, tensor, padding: any(padding) and is_sparse(self.window)
    )
    with padded:
        check((33, 38), grid, how)
        check((33, 38), grid, how | {"groups": 2}, batch=1, bias=False)


def test_a_stride_in_one_direction_and_a_dilation_in_the_other_are_both() -> None:
    plain, strided, dilated = AxisWindow(3, 1, 1), AxisWindow(3, 2, 1), AxisWindow(3, 1, 2, 2)
    assert all(map(is_sparse, [Window(strided, dilated), Window(dilated, strided)]))
    assert not any(map(is_sparse, [Window(strided, plain), Window(plain, dilated), Window(strided, strided)]))


def test_under_autocast_the_types_are_those_of_autocast() -> None:
    how: Settings = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x, w = noise(1, 4, 16, 20, dtype=torch.float32), noise(4, 4, 3, 3, seed=1, dtype=torch.float32)
    have, _, ops = operators((16, 20), (1, 2), how, True)

    def body(comm: Communicator) -> Any:
        y, x_ = have.parts[comm.rank].slices()
        with torch.autocast("cpu", torch.bfloat16):
            (found,), saved = waited(ops[comm.rank].forward(comm, (x[:, :, y, x_], w, None)))
        return found, waited(ops[comm.rank].backward(comm, saved, (torch.ones_like(found),), (True, True, False)))

    (left, (d_left, d_weight, _)), (right, _) = run_ranks(2, body)
    assert left.dtype == torch.bfloat16 and d_left.dtype == torch.float32 and d_weight.dtype == torch.bfloat16
    wanted = F.conv2d(x, w, padding=1)
    torch.testing.assert_close(torch.cat([left, right], 3).float(), wanted, rtol=0.03, atol=0.1)


@dataclass
class Recording:
    """Writes down when messages start and when they are waited for, and says whether they are there before."""

    comm: Communicator
    events: list[str]
    there: bool = True

    def exchange(self, sends: Any, receives: Any) -> Any:
        self.events.append("start")
        pending, recording = self.comm.exchange(sends, receives), self

        class SlowWait:
            needs_polls = False

            def test(self) -> bool:
                return recording.there

            def wait(self) -> None:
                recording.events.append("wait")
                pending.wait()

        return SlowWait()


@dataclass(frozen=True)
class Told(Convolution):
    """Writes down what it computes."""

    events: list[str] = field(default_factory=list)

    def _convolve(self, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.events.append("own" if tensor.shape[3] > 3 else "strip")
        return super()._convolve(tensor, *rest)

    def _native_back(self, dy: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> Any:
        self.events.append("own" if tensor.shape[3] > 3 else "strip")
        return super()._native_back(dy, tensor, *rest)


def test_messages_fly_while_the_own_part_is_computed() -> None:
    how: Settings = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    _, _, ops = operators((16, 20), (1, 2), how, True)

    def body(comm: Communicator) -> list[list[str]]:
        plain = ops[comm.rank]
        op = Told(*(getattr(plain, item.name) for item in fields(plain)))
        recording: Any = Recording(comm, op.events)
        told: list[list[str]] = []

        def tell(result: Any) -> Any:
            told.append(list(op.events))
            op.events.clear()
            return result

        (found,), saved = tell(
            waited(op.forward(recording, (noise(1, 4, 16, 10, seed=comm.rank), noise(4, 4, 3, 3), None)))
        )
        asked = (recording, saved, (found,), (True, True, False))
        d_own, d_weight, _ = tell(waited(op.backward(*asked)))
        for recording.there in (True, False):
            first, rest = tell(waited(op.backward_of_map(*asked)))
            later = tell(rest())
            assert torch.equal(first[0], d_own) and torch.equal(later[1], d_weight)
            assert first[1:] == (None, None) and later[0] is later[2] is None
        return told

    for forward, backward, first, later, first_late, later_late in run_ranks(2, body):
        assert forward == ["start", "own", "wait", "strip"]
        assert backward == ["strip", "start", "own", "own", "strip", "wait"]
        assert (first, later) == (["strip", "start", "own", "wait"], ["own", "strip"])
        # The weight's share is what can be done where strips are late.
        assert (first_late, later_late) == (backward, [])


def test_what_is_saved_is_the_own_part_itself_and_the_strips() -> None:
    how: Settings = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    _, _, ops = operators((16, 20), (1, 2), how, True)

    def body(comm: Communicator) -> bool:
        own = noise(1, 4, 16, 10, seed=comm.rank)
        _, saved = waited(ops[comm.rank].forward(comm, (own, noise(4, 4, 3, 3), None)))
        assert [tuple(strip.shape) for strip in saved.strips] == [(1, 4, 16, 1)]
        return saved.conv_input.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()

    assert run_ranks(2, body) == [True, True]


class AskedCotangents(TorchDispatchMode):
    """Notes which of the cotangents of map, weight and bias PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[tuple[bool, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.asked.add(tuple(args[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("apart", [True, False])
def test_a_cotangent_that_is_of_no_use_is_neither_computed_nor_sent(apart: bool) -> None:
    how: Settings = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    _, _, ops = operators((16, 20), (1, 2), how, apart)

    def body(comm: Communicator) -> Any:
        (found,), saved = waited(ops[comm.rank].forward(comm, (noise(1, 4, 16, 10), noise(4, 4, 3, 3), None)))
        counted = CountedCommunicator(comm)
        with AskedCotangents() as of_weight:
            no_map = waited(ops[comm.rank].backward(counted, saved, (found,), (False, True, False)))
        assert counted.counts.messages["halo"] == 0
        with AskedCotangents() as of_map:
            no_weight = waited(ops[comm.rank].backward(counted, saved, (found,), (True, False, False)))
        assert (of_weight.asked, of_map.asked) == ({(False, True, False)}, {(True, False, False)})
        assert (counted.counts.messages["halo"], counted.counts.sent_bytes["halo"]) == (1, 16 * 4 * 8)
        return [item is None for item in (*no_map, *no_weight)]

    assert run_ranks(2, body) == [[True, False, True, False, True, True]] * 2


@pytest.mark.parametrize("apart", [True, False])
def test_a_cotangent_that_is_missing_is_zero_in_all_channels(apart: bool) -> None:
    how: Settings = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    _, _, ops = operators((16, 20), (1, 2), how, apart)

    def body(comm: Communicator) -> Any:
        inputs = noise(1, 4, 16, 10), noise(6, 4, 3, 3), noise(6)
        _, saved = waited(ops[comm.rank].forward(comm, inputs))
        back = waited(ops[comm.rank].backward(comm, saved, (None,)))
        return [(found.shape == given.shape, bool(found.any())) for found, given in zip(back, inputs, strict=True)]

    assert run_ranks(2, body) == [[(True, False)] * 3] * 2


def test_operations_of_a_value_are_two_for_each_weight() -> None:
    how: Settings = {"kernel": (3, 5), "stride": (1, 1), "padding": (1, 2), "dilation": (1, 1), "groups": 1}
    _, _, ops = operators((16, 20), (1, 2), how, True)
    assert ops[0].flops_of_value(((2, 4, 16, 10), (6, 4, 3, 5), (6,))) == 2 * 4 * 15
