"""Maps of a GPU are spilled by threads with streams of their own; on a GPU made of CPU tensors, in any order."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.cells import pager as pager_module
from hyfi_core.cells import spill_store
from hyfi_core.cells.pager import Pager
from hyfi_core.cells.paging import _Limits
from hyfi_core.cells.spill_store import SpillFile, SpillMemory, SpillStore
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.runtime.calls.paged_call import PagedCall
from tests.fake_gpu import FakeGpu, RaceError
from tests.harness import captured_once

VALUES, MAPS = 1 << 15, 6


def store_of(kind: str, folder: Path) -> SpillStore:
    return SpillMemory() if kind == "memory" else SpillFile(folder)


def pass_over(gpu: FakeGpu, store: SpillStore) -> list[float]:
    """Make maps of which two fit, change each twice, and return their sums."""
    pager = Pager(store, 2 * VALUES * 4, lambda: 0)
    maps: list[torch.Tensor] = []
    for number in range(MAPS):
        pager.make_room(VALUES * 4)
        maps.append(torch.full((VALUES,), float(number), device="cuda"))
        pager.track(maps[-1], [(MAPS + number) << 20, (2 * MAPS + number) << 20])
        pager.begin([])
        pager.end(number << 20)
    for now in range(MAPS, 3 * MAPS):
        one = maps[now % MAPS]
        pager.begin([one])
        one.add_(1.0)
        pager.end(now << 20)
    sums = []
    for one in maps:
        pager.begin([one])
        sums.append(float(one.double().mean()))
        pager.end(3 * MAPS << 20)
    assert pager.counts.read_bytes > 0 and pager.counts.written_bytes > 0
    return sums


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_maps_of_a_gpu_come_back_as_they_were(kind: str, seed: int, tmp_path: Path) -> None:
    with FakeGpu(seed) as gpu:
        found = pass_over(gpu, store_of(kind, tmp_path))
    assert found == [number + 2.0 for number in range(MAPS)]


def without_event(threads: Any, job: Any, storage: torch.UntypedStorage, place: Any) -> Future[None]:
    """As ``queued``, but the thread's stream does not wait for what was given before."""
    return threads.submit(spill_store._on_own_stream, torch.cuda.Event(), job, storage, place)


def test_a_copy_that_does_not_wait_for_the_map_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager_module, "queued", without_event)
    with FakeGpu() as gpu, pytest.raises(RaceError, match="may still be using its memory"):
        pass_over(gpu, SpillMemory())


def test_a_map_that_is_freed_while_it_is_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(store: SpillMemory, storage: torch.UntypedStorage, place: Any) -> None:
        place.memory.copy_(spill_store._tensor_of(storage), non_blocking=True)  # nobody waits

    monkeypatch.setattr(SpillMemory, "write", write)
    with FakeGpu() as gpu, pytest.raises(RaceError, match="memory was freed"):
        pass_over(gpu, SpillMemory())


class Network(nn.Module):
    """Maps that are kept, recomputed, and overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.second, self.last = nn.Conv2d(16, 16, 3, 1, 1), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last((self.second(x).relu() + x).mean((2, 3)))


def test_a_step_that_spills_equals_one_that_does_not(tmp_path: Path) -> None:
    shape, labels = (1, 3, 96, 96), torch.tensor([1])
    torch.manual_seed(0)
    model, images = Network().double(), torch.randn(shape, dtype=torch.float64)
    captured_once(model, shape, torch.float64)
    reference = copy.deepcopy(model)
    nn.functional.cross_entropy(reference(images), labels).backward()
    with FakeGpu(1):
        plan = hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 1), spill=str(tmp_path), memory_bytes=1 << 40)
        engine = hyfi_core.parallelize(model.to("cuda"), shape, plan, AloneCommunicator(), verify=False)
        assert engine._paging is not None
        engine._paging._limits[PagedCall(shape, True)] = _Limits(1 << 20, None, 0)  # less than its maps
        engine.accumulate(images, labels)
        counts = engine.spilled()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    assert counts is not None and counts.written_bytes > 0 and counts.read_bytes > 0
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
