from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.stages import cut_program
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machine import load_machine
from hyfi_core.cost.memory import microbatches_in_flight
from hyfi_core.cost.node.resident import _between_bytes, kept_bytes
from hyfi_core.cost.simulator import forecast_step, rank_bytes
from hyfi_core.ops.boundary import BoundaryTransfer
from hyfi_core.plan.parallel_plan import BUCKET_BYTES, ParallelPlan
from tests.harness import captured_once, run_copies
from tests.hyfi_core.cost.test_simulator import program


def kept(maps_bytes: int, **plan: Any) -> int:
    return kept_bytes(program(), ParallelPlan(grids=((1, 1),), **plan), (maps_bytes,))[0]


def test_a_heap_keeps_holes_between_maps_and_messages_need_buckets() -> None:
    assert kept(10_000_000) - kept(0) == 1_700_000
    assert kept(10_000_000, microbatches=2) - kept(0, microbatches=2) == 3_000_000
    assert kept(0, replicas=2) - kept(0) >= 2 * BUCKET_BYTES
    largest = 32 * 32 * 25 * 4
    assert kept(0) == 4 * largest + 75_000 * len(program().operators)


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


def test_each_direction_has_half_of_the_microbatches() -> None:
    plan = ParallelPlan(grids=((1, 1), (1, 1)), cuts=("first",), microbatches=2, schedule="chimera")
    assert [microbatches_in_flight(plan, stage) for stage in range(2)] == [1, 1]
