"""Batch norm by its definition, however ranks send their statistics; blocks of a map; counts of windows of means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import waited
from hyfi_core.ops.avg_pool import counts
from hyfi_core.ops.norms import batch_norm
from hyfi_core.ops.norms.batch_norm import BatchNorm, FusedBatchNorm
from hyfi_core.plan.box import Box
from hyfi_core.plan.window import AxisWindow
from tests.hyfi_core.cells.test_communicator import on_cells, on_two_processes

CUTS = (0, 3, 3, 6, 8)  # the second rank owns nothing


@pytest.mark.parametrize("ranks", ["threads", "cells", "cells of two processes"])
@pytest.mark.parametrize("most_rows", [3, 4])  # of four ranks: sums of squares, or a row for each
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_batch_norm_and_its_cotangents_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, most_rows: int, affine: bool, kind: torch.dtype, ranks: str
) -> None:
    monkeypatch.setattr(batch_norm, "MOST_ROWS", most_rows)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 4, 8, 5, dtype=torch.float64, generator=generator) + 1 for _ in range(2))
    scales = [torch.rand(4, dtype=torch.float64, generator=generator) + 0.5 for _ in range(2)]
    exact = [one.clone().requires_grad_() for one in (x, *scales)]
    y = F.batch_norm(exact[0], None, None, *(exact[1:] if affine else ()), training=True, eps=0.01)
    y.backward(dy)
    own_scales = [one.to(kind) for one in scales] if affine else [None, None]

    def body(comm: Communicator) -> Any:
        rows = slice(CUTS[comm.rank], CUTS[comm.rank + 1])
        norm = BatchNorm(80, 0.01)
        inputs = (x[:, :, rows].to(kind).contiguous(), *own_scales)
        outputs, saved = waited(norm.forward(comm, inputs))  # type: ignore[arg-type]
        cotangent = dy[:, :, rows].to(kind).contiguous()
        back = waited(norm.backward(comm, saved, (cotangent, None, None)))
        assert torch.equal(norm.recompute(inputs, saved), outputs[0])  # type: ignore[arg-type]
        unused = waited(norm.backward(comm, saved, (None, None, None)))
        assert not any(one.any() for one in unused if one is not None)
        needless = waited(norm.backward(comm, saved, (cotangent,), (False, True, True)))
        assert needless[0] is None and torch.equal(needless[1], back[1])  # type: ignore[arg-type]
        return outputs, back

    results = {"threads": lambda: run_ranks(4, body), "cells": lambda: on_cells(4, body)}
    found = results.get(ranks, lambda: on_two_processes(body))()
    tolerance = 1e-11 if kind == torch.float64 else 1e-5
    joined = torch.cat([outputs[0] for outputs, _ in found], 2), torch.cat([back[0] for _, back in found], 2)
    for ours, wanted in zip(joined, (y.detach(), exact[0].grad), strict=True):
        assert torch.allclose(ours.double(), wanted, atol=tolerance)  # type: ignore[arg-type]
    for outputs, _ in found:
        assert torch.allclose(outputs[1].double(), x.mean((0, 2, 3)), atol=tolerance)
        assert torch.allclose(outputs[2].double(), x.var((0, 2, 3), correction=0), atol=tolerance)
    unit = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 0.01).sqrt()
    for at, wanted in ((1, (dy * unit).sum((0, 2, 3))), (2, dy.sum((0, 2, 3)))):
        assert torch.allclose(sum(back[at] for _, back in found).double(), wanted, atol=100 * tolerance)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block", [20, 1 << 16])
def test_pixels_that_others_own_are_normalised_and_not_counted(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, block: int
) -> None:
    """Each rank holds a margin of its neighbours; a copy is a variable of its own, whose cotangent is of its own y."""
    monkeypatch.setattr(batch_norm, "_BLOCK_VALUES", block)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64, generator=generator).to(kind).double()
    held, owned = [Box(0, 5, 0, 6), Box(3, 8, 0, 6)], [Box(0, 4, 0, 6), Box(1, 5, 0, 6)]
    pieces = [x[:, :, box.y0 : box.y1].clone().requires_grad_() for box in held]
    dys = [torch.randn(2, 3, 5, 6, dtype=torch.float64, generator=generator).to(kind).double() for _ in held]
    counted = torch.cat([piece[:, :, box.y0 : box.y1] for piece, box in zip(pieces, owned, strict=True)], 2)
    mean, variance = counted.mean((0, 2, 3), keepdim=True), counted.var((0, 2, 3), correction=0, keepdim=True)
    sum(
        ((piece - mean) / (variance + 1e-3).sqrt() * dy).sum() for piece, dy in zip(pieces, dys, strict=True)
    ).backward()  # type: ignore[union-attr]

    def body(comm: Communicator) -> Any:
        norm = FusedBatchNorm(96, 1e-3, owned=owned[comm.rank])
        outputs, saved = waited(norm.forward(comm, (pieces[comm.rank].detach().to(kind), None, None)))  # type: ignore[arg-type]
        return outputs[0], waited(norm.backward(comm, saved, (dys[comm.rank].to(kind), None, None)))[0]

    tolerance = 1e-11 if kind == torch.float64 else 0.03
    for (normalised, back), piece in zip(run_ranks(2, body), pieces, strict=True):
        wanted = (piece.detach() - mean.detach()) / (variance.detach() + 1e-3).sqrt()
        assert torch.allclose(normalised.double(), wanted, atol=tolerance)
        assert torch.allclose(back.double(), piece.grad, atol=tolerance)  # type: ignore[arg-type]


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 20), st.integers(1, 9), st.integers(1, 300))
def test_blocks_cover_all_rows_and_are_as_high_as_allowed(n: int, c: int, h: int, w: int, values: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_norm, "_BLOCK_VALUES", values)
        found = list(batch_norm._blocks(torch.empty(n, c, h, w)))
    if not n * h:
        assert found == [(0, 0)]
        return
    assert [row for top, height in found for row in range(top, top + height)] == list(range(h))
    most = max(1, values // (n * c * w))
    assert all(height == most for _, height in found[:-1]) and found[-1][1] <= most
    assert list(batch_norm._blocks(torch.empty(5, 3))) == [(0, 0)]


@settings(deadline=None)
@given(
    st.builds(AxisWindow, st.integers(1, 5), st.integers(1, 4), st.integers(0, 2)),
    st.integers(1, 12),
    st.integers(0, 8),
    st.integers(1, 6),
    st.booleans(),
)
def test_means_count_positions_of_the_map_and_maybe_its_padding(
    window: AxisWindow, length: int, start: int, outputs: int, include_pad: bool
) -> None:
    beyond = window.padding if include_pad else 0
    positions = range(-beyond, length + beyond)
    wanted = []
    for output in range(start, start + outputs):
        first = output * window.stride - window.padding
        wanted.append(max(1, sum(at in positions for at in range(first, first + window.kernel))))
    assert counts(window, start, start + outputs, length, include_pad) == wanted
