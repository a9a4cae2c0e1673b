from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hyfi_core
from hyfi_core.capture.stages import cut_program
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.memory.resident import (
    HEAP_BLOCK_BYTES,
    HUGE_PAGE_BYTES,
    _between_bytes,
    gaps_bytes,
    kept_bytes,
)
from hyfi_core.cost.step.simulator import forecast_step, rank_bytes
from hyfi_core.ops.boundary import BoundaryTransfer
from hyfi_core.plan.parallel_plan import BUCKET_BYTES, ParallelPlan
from tests.harness import captured_once, run_copies
from tests.hyfi_core.cost.step.test_simulator import program


def kept(maps_bytes: int, **plan: Any) -> int:
    return kept_bytes(program(), ParallelPlan(grids=((1, 1),), **plan), (maps_bytes,))[0]


def test_a_heap_keeps_holes_between_maps_and_messages_need_buckets() -> None:
    assert kept(10_000_000) - kept(0) == 2_500_000
    assert kept(0, replicas=2) - kept(0) >= 2 * BUCKET_BYTES
    assert kept(0) == 75_000 * len(program().operators)  # nothing of it is as large as a huge page


@given(st.lists(st.integers(0, 3 * HUGE_PAGE_BYTES)))
def test_gaps_are_what_is_left_of_pages(sizes: list[int]) -> None:
    """The heap's own bytes are before a tensor, so that one of whole pages leaves nearly a page."""
    pages = [-(-(size + 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES for size in sizes]
    gaps = [page - size for page, size in zip(pages, sizes, strict=True) if size >= HUGE_PAGE_BYTES]
    assert gaps_bytes(sizes) == sum(gaps)
    assert gaps_bytes([HEAP_BLOCK_BYTES]) == 0  # mapped for itself


def test_large_maps_of_all_micro_batches_in_flight_leave_gaps() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(), nn.Flatten())
    captured = captured_once(model.train(), (1, 3, 128, 128), torch.float32)  # maps of 2 MiB
    one = (
        kept_bytes(captured, ParallelPlan(((1, 1),)), (0,))[0]
        - kept_bytes(captured, ParallelPlan(((1, 2),)), (0, 0))[0]
    )
    assert one == int(0.3 * HUGE_PAGE_BYTES) - 2 * BUCKET_BYTES
    cut = {"grids": ((1, 1), (1, 1)), "cuts": ("1",)}
    several = [kept_bytes(captured, ParallelPlan(**cut, microbatches=n), (0, 0))[0] for n in (1, 2)]
    assert several[1] - several[0] == pytest.approx(0.3 * HUGE_PAGE_BYTES, abs=1)


class Ladder(nn.Module):
    """Two values pass from one half to the other, or one."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.values = values
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.three, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        older = self.one(images).sigmoid()
        newer = self.two(older).sigmoid()
        maps = self.three(newer) * older if self.values == 2 else self.three(newer)
        answer: torch.Tensor = self.head(maps.mean((2, 3)))
        return answer


@pytest.mark.parametrize("values", [1, 2])
def test_buffers_of_messages_between_stages_are_those_that_a_run_keeps(values: int) -> None:
    shape, plan = (1, 3, 32, 32), ParallelPlan(grids=((1, 1), (1, 1)), cuts=("two",), schedule="sequential")
    found: dict[int, dict[int, BoundaryTransfer]] = {}
    take = BoundaryTransfer.buffer

    def recorded(self: BoundaryTransfer, pieces: Any, device: torch.device) -> torch.Tensor:
        found.setdefault(threading.get_ident(), {})[id(self)] = self
        return take(self, pieces, device)

    def body(comm: Communicator, model: nn.Module) -> int:
        engine = hyfi_core.parallelize(model, shape, plan, comm, verify=False)
        for _ in range(3):
            engine.accumulate(torch.rand(shape), torch.zeros(1, dtype=torch.long))
        return sum(one._buffers.bytes for one in found[threading.get_ident()].values())

    with mock.patch.object(BoundaryTransfer, "buffer", recorded):
        kept_by_ranks = run_copies(Ladder(values).train(), 2, body)
    captured = captured_once(Ladder(values).train(), shape, torch.float32)
    assert kept_by_ranks == [_between_bytes(piece) for piece in cut_program(captured, captured.outputs, ("two",))]
    more = kept_bytes(captured, plan, (0, 0))[0] - kept_bytes(captured, ParallelPlan(((1, 1),)), (0,))[0]
    assert more == kept_by_ranks[0] + 2 * BUCKET_BYTES


def test_only_a_process_on_a_cpu_keeps_what_is_freed() -> None:
    plan = ParallelPlan(grids=((1, 1),))
    needed = rank_bytes(program(), plan)
    assert forecast_step(program(), plan, load_machine("h100")).resident_bytes == needed
    assert forecast_step(program(), plan, load_machine("cpu")).resident_bytes[0] > needed[0]
