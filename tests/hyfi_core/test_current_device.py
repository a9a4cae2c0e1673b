"""Threads of the engine make its GPU the current one before they do anything else."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.cells.baton import Baton
from hyfi_core.cells.pager import Pager
from hyfi_core.cells.spill_store import SpillMemory
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.current_device import as_in_this_thread, current_device, make_current
from hyfi_core.models.resnet import resnet6


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return (thread, what it did), in order, where a GPU is made current."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.append((threading.current_thread().name, str(device)))
    )
    return found


def test_cells_and_writers_begin_with_the_device(seen: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells also with the stream of the thread that runs them: on another, kernels would not wait for its own."""
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {threading.current_thread().name}")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: seen.append((threading.current_thread().name, stream)))
    turns = Baton(2, prepared=lambda: as_in_this_thread(device))
    turns.run(lambda cell: seen.append((f"cell-{cell}", "runs")))
    for cell in ("cell-0", "cell-1"):
        assert [what for thread, what in seen if thread == cell] == ["cuda:1", "stream of MainThread", "runs"]
    pager = Pager(SpillMemory(), 0, lambda: 0, device)
    pager._threads.submit(seen.append, ("spill", "writes")).result()
    assert any(thread.startswith("spill") and what == "cuda:1" for thread, what in seen)
    assert seen[-1] == ("spill", "writes")


def test_a_cpu_is_nobody_s_current_device(seen: list[tuple[str, str]]) -> None:
    make_current(torch.device("cpu"))
    assert not seen and (torch.cuda.is_initialized() or current_device() == torch.device("cpu"))


@pytest.mark.cuda
@pytest.mark.parametrize("spill", [None, "memory"])
def test_no_thread_is_without_a_context(spill: str | None) -> None:
    model = resnet6(2).cuda()
    plan = hyfi_core.ParallelPlan(((1, 1),), cells=(2, 2), spill=spill)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no current CUDA context.*")
        engine = hyfi_core.parallelize(model, (2, 3, 64, 64), plan, AloneCommunicator(), loss=F.cross_entropy)
        engine.accumulate(torch.randn(2, 3, 64, 64).cuda(), torch.tensor([0, 1]).cuda())
        engine.predict(torch.randn(2, 3, 64, 64).cuda())
