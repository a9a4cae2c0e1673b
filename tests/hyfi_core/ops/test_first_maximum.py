"""The first maximum over ranks is that of one process, NaN and parts that own nothing included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.ops.reduce import FirstMaximum
from hyfi_core.plan.layout import Layout


@pytest.mark.parametrize("broken", [(), ((0, 1, 4, 2),), ((0, 1, 4, 2), (0, 1, 0, 3))])
def test_nan_wins_and_of_several_the_last(broken: tuple[tuple[int, ...], ...]) -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for place in broken:
        x[place] = torch.nan
    layout, leaf = Layout((0, 2, 2, 5), (0, 4)), x.clone().requires_grad_()
    wanted, indices = F.adaptive_max_pool2d(leaf, 1, return_indices=True)
    wanted.backward(torch.ones_like(wanted))

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        box = layout.parts[comm.rank]
        op, (y, x_) = FirstMaximum(box, 4), box.slices()
        (top, where), saved = waited(op.forward(comm, (x[:, :, y, x_].contiguous(),)))
        share = torch.ones_like(top) if comm.rank == 0 else None
        back = waited(op.backward(comm, saved, (share, None)))[0]
        assert back is not None
        return top, where, back

    found = run_ranks(3, body)
    for top, where, _ in found:
        torch.testing.assert_close(top, wanted.detach(), equal_nan=True)
        assert torch.equal(where, indices)
    assert leaf.grad is not None
    torch.testing.assert_close(torch.cat([back for *_, back in found], 2), leaf.grad)
