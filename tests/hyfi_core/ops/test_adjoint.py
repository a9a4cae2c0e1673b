"""Every communication against its adjoint: the inner products <F x, y> and <x, F* y> are equal in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.ops.plane_exchange import PlaneExchange, PlaneValue
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.ops.reduce import MaxOverSpace, SumOverRanks
from hyfi_core.plan import Box, Layout, plan_transfer


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_redistribution(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    layout = Layout.even(height, width, (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))))
    edge = st.integers(-2, 11)
    need = [Box(data.draw(edge), data.draw(edge), data.draw(edge), data.draw(edge)) for _ in layout.parts]

    def body(comm: Communicator) -> tuple[float, float]:
        op = Redistribute(plan_transfer(layout.parts, need, layout.map, comm.rank))
        part = layout.parts[comm.rank]
        x = noise(2, 3, *part.shape, seed=comm.rank)
        (out,), saved = waited(op.forward(comm, (x,)))
        assert out.shape[2:] == need[comm.rank].shape
        y = noise(*out.shape, seed=50 + comm.rank)
        (back,) = waited(op.backward(comm, saved, (y,)))
        assert back is not None
        return float((out * y).sum()), float((x * back).sum())

    pairs = run_ranks(len(need), body)
    forward, backward = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    assert abs(forward - backward) <= 1e-12 * max(1.0, abs(forward))


@pytest.mark.parametrize("layout_in_memory", [torch.contiguous_format, torch.channels_last])
def test_redistribution_brings_the_very_pixels(layout_in_memory: torch.memory_format) -> None:
    whole = noise(2, 3, 7, 10, seed=1)
    layout = Layout.even(7, 10, (2, 3))
    need = [Box(p.y0 - 1, p.y1 + 2, p.x0 - 3, p.x1 + 1) for p in layout.parts]

    def body(comm: Communicator) -> torch.Tensor:
        op = Redistribute(plan_transfer(layout.parts, need, layout.map, comm.rank), fill=-7.0)
        y, x = layout.parts[comm.rank].slices()
        return waited(op.forward(comm, (whole[:, :, y, x].contiguous(memory_format=layout_in_memory),)))[0][0]

    padded = torch.full((2, 3, 17, 20), -7.0, dtype=torch.float64)
    padded[:, :, 5:12, 5:15] = whole
    for box, found in zip(need, run_ranks(6, body), strict=True):
        y, x = box.shift(5, 5).slices()
        assert torch.equal(found, padded[:, :, y, x])


def test_a_missing_cotangent_is_zero_and_neighbours_still_get_theirs() -> None:
    layout = Layout.even(4, 4, (1, 2))
    need = [Box(0, 4, 0, 3), Box(0, 4, 1, 4)]

    def body(comm: Communicator) -> Any:
        op = Redistribute(plan_transfer(layout.parts, need, layout.map, comm.rank))
        (out,), saved = waited(op.forward(comm, (noise(1, 1, 4, 2, seed=comm.rank),)))
        return waited(op.backward(comm, saved, (torch.ones_like(out) if comm.rank else None,)))[0]

    left, right = run_ranks(2, body)
    assert left is not None and left[0, 0, 0].tolist() == [0.0, 1.0]
    assert right is not None and right[0, 0, 0].tolist() == [1.0, 1.0]


def test_a_sum_over_ranks_is_its_own_adjoint() -> None:
    def body(comm: Communicator) -> tuple[float, float]:
        x, y = noise(5, seed=comm.rank), noise(5, seed=9 + comm.rank)
        (out,), saved = waited(SumOverRanks().forward(comm, (x,)))
        (back,) = waited(SumOverRanks().backward(comm, saved, (y,)))
        assert back is not None
        return float((out * y).sum()), float((x * back).sum())

    pairs = run_ranks(3, body)
    assert abs(sum(p[0] for p in pairs) - sum(p[1] for p in pairs)) < 1e-12


def gathered(op: Any, whole: torch.Tensor, cotangent: torch.Tensor, *rest: Any, grid: tuple[int, int] = (2, 2)) -> Any:
    """Run an operator on a map's parts; return (rank 0's outputs, whole output, input's cotangent, others summed)."""
    layout = Layout.even(*whole.shape[2:], grid)

    def body(comm: Communicator) -> Any:
        y, x = layout.parts[comm.rank].slices()
        outputs, saved = waited(op.forward(comm, (whole[:, :, y, x].contiguous(), *rest)))
        split = outputs[0].shape[2:] == layout.parts[comm.rank].shape and cotangent.shape == whole.shape
        share = cotangent[:, :, y, x] if split else cotangent * (comm.rank == 0)
        return outputs, waited(op.backward(comm, saved, (share, *[None] * (len(outputs) - 1))))

    results = run_ranks(len(layout.parts), body)
    back = torch.zeros_like(whole)
    normalised = torch.zeros_like(whole)
    for part, (outputs, cotangents) in zip(layout.parts, results, strict=True):
        y, x = part.slices()
        back[:, :, y, x] = cotangents[0]
        if cotangent.shape == whole.shape:
            normalised[:, :, y, x] = outputs[0]
    others = [sum(result[1][i] for result in results) for i in range(1, len(results[0][1]))]
    return results[0][0], normalised, back, others


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 3, 1, 3), (3, 2, 2, 1)])
def test_batch_norm_over_the_whole_map(shape: tuple[int, ...]) -> None:
    x, y = noise(*shape, seed=1) + 30, noise(*shape, seed=2)
    weight, bias = noise(shape[1], seed=3), noise(shape[1], seed=4)
    count = shape[0] * shape[2] * shape[3]
    _, found, back, (d_weight, d_bias) = gathered(BatchNorm(count, 1e-5), x, y, weight, bias)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    wanted = torch.nn.functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True)
    wanted.backward(y)
    for ours, theirs in ((found, wanted), (back, leaves[0].grad), (d_weight, leaves[1].grad), (d_bias, leaves[2].grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_batch_norm_in_float32_is_as_good_as_the_native_one_where_the_mean_is_large() -> None:
    exact = noise(1, 8, 64, 64, seed=5) + 30
    x = exact.float()
    ones, zeros = torch.ones(8), torch.zeros(8)
    _, found, _, _ = gathered(BatchNorm(64 * 64, 1e-5), x, x, ones, zeros)
    truth = torch.nn.functional.batch_norm(x.double(), None, None, None, None, True)
    native = torch.nn.functional.batch_norm(x, None, None, ones, zeros, True)
    assert (found - truth).norm() <= 2 * (native - truth).norm()


def test_the_maximum_shares_its_cotangent_among_ties_on_different_ranks() -> None:
    x = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    x[0, 1, 0, 0] = x[0, 1, 3, 3] = 5.0
    y = noise(1, 2, seed=6)
    outputs, _, back, _ = gathered(MaxOverSpace((2, 3), False), x, y)
    leaf = x.clone().requires_grad_()
    leaf.amax((2, 3)).backward(y)
    assert torch.equal(outputs[0], x.amax((2, 3)))
    torch.testing.assert_close(back, leaf.grad, rtol=0, atol=1e-15)


def test_all_gradients_of_a_maximum_that_is_nan_are_nan() -> None:
    x, y = noise(1, 2, 4, 4, seed=6), noise(1, 2, seed=7)
    x[0, 1, 3, 0] = torch.nan
    _, _, back, _ = gathered(MaxOverSpace((2, 3), False), x, y)
    leaf = x.clone().requires_grad_()
    leaf.amax((2, 3)).backward(y)
    torch.testing.assert_close(back, leaf.grad, rtol=0, atol=1e-15, equal_nan=True)
    assert back[0, 1].isnan().all() and not back[0, 0].isnan().any()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 4, 1, 6), [(24, 1, 1, 4), (24, 1, 24, 4), (24, 6, 6, 1)]), ((2, 4, 6, 1), [(24, 1, 4, 1), (24, 6, 1, 6)])],
)
def test_batch_norm_of_one_row_or_column_in_any_order_of_memory(shape: tuple[int, ...], strides: list[Any]) -> None:
    """Sums are wrong in torch 2.13 where map and cotangent are in different orders."""
    x, dy = (noise(*shape, seed=seed) for seed in (1, 2))
    leaf = x.clone().requires_grad_()
    F.batch_norm(leaf, None, None, training=True).backward(dy)
    for order in product(strides, repeat=2):
        own, cotangent = (
            torch.empty_strided(shape, one, dtype=x.dtype).copy_(tensor)
            for one, tensor in zip(order, (x, dy), strict=True)
        )
        op = BatchNorm(12, 1e-5)
        _, saved = waited(op.forward(AloneCommunicator(), (own, None, None)))
        found = waited(op.backward(AloneCommunicator(), saved, (cotangent, None, None)))[0]
        torch.testing.assert_close(found, leaf.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels_last", [False, True])
def test_exchange_between_planes(channels_last: bool) -> None:
    """Large and small values, of which one has an empty part, and one that carries no gradient."""
    values = (
        PlaneValue("large", (2, 6, 40, 30), torch.float64, 0, (1, 2)),
        PlaneValue("small", (3, 4), torch.float64, 1, (0,)),
        PlaneValue("map", (1, 2, 3, 4), torch.float64, 1, (0, 2)),
        PlaneValue("none", (1, 2, 0, 4), torch.float64, 2, (0, 1)),
        PlaneValue("count", (), torch.int64, 2, (0, 1)),
        PlaneValue("still", (5,), torch.float64, 0, (2,)),
    )
    active = frozenset(("large", "small", "map", "none"))

    def body(comm: Communicator) -> tuple[float, float]:
        op = PlaneExchange(values, comm.rank, torch.device("cpu"), channels_last).carrying(active)
        given = {v.name: noise(*v.shape, seed=at).to(v.dtype) for at, v in enumerate(values)}
        outputs, saved = waited(op.forward(comm, tuple(given[v.name] for v in op.sent)))
        for value, output in zip(op.received, outputs, strict=True):
            assert torch.equal(output, given[value.name]) and output.dtype == value.dtype
        y = [noise(*v.shape, seed=50 + comm.rank) if v.name in active else None for v in op.received]
        backs = waited(op.backward(comm, saved, tuple(y)))
        assert all(back is None for v, back in zip(op.sent, backs, strict=True) if v.name not in active)
        forward = sum(float((out * z).sum()) for out, z in zip(outputs, y, strict=True) if z is not None)
        found = zip(op.sent, backs, strict=True)
        return forward, sum(float((given[v.name] * back).sum()) for v, back in found if back is not None)

    pairs = run_ranks(3, body, strict=True)
    forward, backward = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    assert abs(forward - backward) <= 1e-12 * max(1.0, abs(forward))


def test_the_largest_exchange_is_what_a_plane_sends_to_all_or_receives() -> None:
    def largest(*values: tuple[int, int, tuple[int, ...]]) -> int:
        planes = tuple(PlaneValue(str(n), (n,), torch.float32, owner, takers) for n, owner, takers in values)
        return PlaneExchange(planes, 0, torch.device("cpu")).largest_bytes

    assert largest((5, 0, (1, 2)), (7, 1, (0,)), (1, 2, (0,))) == 4 * 10, "the first plane sends five numbers to two"
    assert largest((5, 0, (1,)), (7, 1, (0,)), (4, 2, (0, 1))) == 4 * 11, "the first plane receives from two"
