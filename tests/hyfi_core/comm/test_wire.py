"""Numbers are reduced alike on every adapter, NaN included."""

from __future__ import annotations

import math

import pytest
import torch

from hyfi_core.comm.base import Communicator, ReduceOp
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.wire import from_wire, reduced, to_wire

VALUES = [0.0, -0.0, 1.5, -1.5, 1e-40, -1e-40, 3e38, -3e38, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["max", "min"])
def test_floats_travel_as_integers_of_the_same_order(dtype: torch.dtype, op: ReduceOp) -> None:
    values = torch.tensor([*VALUES, math.nan, -math.nan]).to(dtype)
    for first in values:
        for second in values:
            wires = [to_wire(value.reshape(1), op) for value in (first, second)]
            assert not wires[0].is_floating_point()
            wire = torch.maximum(*wires) if op == "max" else torch.minimum(*wires)
            found = torch.zeros(1, dtype=dtype)
            from_wire(wire, found, op)
            wanted = torch.maximum(first, second) if op == "max" else torch.minimum(first, second)
            assert torch.equal(found[0], wanted) or (bool(found.isnan()) and bool(wanted.isnan())), (first, second)


def test_sums_of_narrow_floats_are_rounded_once() -> None:
    parts = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.tensor([1.0], dtype=torch.bfloat16)] * 8
    assert float(reduced(parts, "sum")) == 264.0
    assert run_ranks(9, lambda comm: _sum(comm, parts[comm.rank])) == [264.0] * 9


def _sum(comm: Communicator, part: torch.Tensor) -> float:
    total = part.clone()
    comm.all_reduce(total)
    return float(total)


def test_a_sum_of_wide_numbers_is_not_copied() -> None:
    tensor = torch.zeros(3)
    assert to_wire(tensor, "sum").data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("op", ["max", "min", "sum"])
def test_a_nan_on_one_rank_is_nan_on_all(op: ReduceOp) -> None:
    def body(comm: Communicator) -> bool:
        share = torch.tensor([math.nan if comm.rank == 1 else 2.0, 1.0])
        comm.all_reduce(share, op)
        return bool(share[0].isnan()) and not bool(share[1].isnan())

    assert run_ranks(3, body) == [True] * 3
