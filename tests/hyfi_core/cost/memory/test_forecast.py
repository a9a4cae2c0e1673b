from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.cost.memory.forecast import (
    MemoryForecast,
    PeakOrLeast,
    enough_gb,
    forecast_memory,
    held_bytes,
    rank_peaks,
)
from hyfi_core.plan.parallel_plan import ParallelPlan, ScheduleName
from hyfi_core.schedule.in_flight import Moment
from tests.harness import captured_once
from tests.patience import PATIENCE_S
from workflows.launch.launch import RANK_SETTINGS

ROOT = Path(__file__).parents[3]
PX = 32
ALONE = (Moment(0, (0,), (False,)),)
WAYS: tuple[PeakOrLeast, ...] = ("peak", "least")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.second(self.first(images)).mean((2, 3)))
        return answer


def forecast(**plan: Any) -> tuple[MemoryForecast, ...]:
    return forecast_memory(captured(), ParallelPlan(**plan))


@cache
def captured() -> Program:
    return captured_once(Network().train(), (1, 3, PX, PX), torch.float32)


def test_what_backward_needs_again_is_counted_once() -> None:
    (found,) = forecast(grids=((1, 1),))
    plane = PX * PX * 4
    # The image, the first relu's result (the next convolution's input), both results around the norm, the means.
    assert found.saved_bytes == (3 + 4 + 8 + 8) * plane + 8 * 4 == found.waiting_bytes
    weights = sum(p.numel() * 4 for p in Network().parameters())
    assert found.state_bytes == 4 * weights and found.weight_bytes == weights
    assert found.working_bytes >= 16 * plane


def test_parts_divide_activations_and_not_weights() -> None:
    (one,), (four,) = forecast(grids=((1, 1),)), forecast(grids=((2, 2),))
    assert four.saved_bytes == one.saved_bytes // 4 and four.state_bytes == one.state_bytes
    weights = one.weight_bytes
    assert one.later_bytes / 4 < four.later_bytes <= (one.later_bytes - weights) / 4 + 4 * weights


def test_recomputing_stages_wait_with_what_they_take() -> None:
    plane, cut = PX * PX * 4, {"grids": ((1, 1), (1, 1)), "cuts": ("first",), "microbatches": 4}
    first, second = forecast(**cut)
    assert first.waiting_bytes == (3 + 4) * plane and second.waiting_bytes == (4 + 8 + 8) * plane + 8 * 4
    first, second = forecast(**cut, recompute=True)
    assert first.waiting_bytes == 3 * plane and second.waiting_bytes == 4 * plane
    assert first.saved_bytes == (3 + 4) * plane


def stage(weights: int, saved: int, working: int) -> MemoryForecast:
    """Return a stage whose backward needs ``working`` beside what is saved."""
    return MemoryForecast(4 * weights, saved, working, saved, saved + working, saved + working + weights)


def test_a_rank_has_what_waits_and_what_runs() -> None:
    one, two = stage(1, 10, 100), stage(2, 20, 7)
    grids = ((1, 1), (1, 1))

    def peaks(schedule: ScheduleName, microbatches: int = 4) -> tuple[int, ...]:
        return rank_peaks(ParallelPlan(grids, "auto", microbatches, schedule), (one, two))

    assert peaks("gpipe") == (3 + 3 * 10 + 110, 6 + 3 * 20 + 27)  # the first backward, when there are no gradients
    assert peaks("1f1b") == (3 + 1 + 10 + 110, 6 + 2 + 27)
    assert peaks("1f1b", 1) == (3 + 110, 6 + 27) and peaks("sequential") == (3 + 1 + 110, 6 + 2 + 27)
    # Both directions: while the first stage runs, nothing of the other waits, but all gradients are there.
    assert peaks("chimera") == peaks("gems_master") == (9 + 3 + 110,) * 2
    # In one repetition of two micro-batches, one waits; on the second rank with the other stage's gradients.
    assert peaks("gems_mast") == (9 + 1 + 20 + 110, 9 + 2 + 20 + 110)


def test_gradients_in_buckets_are_there_throughout() -> None:
    alone, reduced = (forecast(grids=((1, 1),), replicas=replicas)[0] for replicas in (1, 2))
    assert not alone.gradients_stay and reduced.gradients_stay
    assert held_bytes([reduced], ALONE) == held_bytes([alone], [replace(ALONE[0], gradients=(True,))])
    assert held_bytes([reduced], ALONE, "least") == held_bytes([alone], ALONE, "least") + alone.weight_bytes


def test_the_least_is_what_is_kept_or_the_state() -> None:
    assert held_bytes([stage(1, 10, 100)], ALONE, "least") == 3 + 10
    assert held_bytes([stage(5, 3, 1)], ALONE, "least") == 4 * 5


def test_forecasts_with_arrays_are_those_of_each_place() -> None:
    numbers = [stage(1, 10, 100), stage(5, 3, 1), stage(2, 8, 3)]
    fields = {name: np.array([getattr(one, name) for one in numbers]) for name in MemoryForecast.__slots__}
    together: Any = MemoryForecast(**{**fields, "gradients_stay": False})
    for way in WAYS:
        found: Any = held_bytes([together], ALONE, way)
        assert found.tolist() == [held_bytes([one], ALONE, way) for one in numbers]


MEASURE = """
import sys, torch, hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.cost.memory.forecast import forecast_memory, rank_peaks
from hyfi_core.models.resnet import resnet18
from hyfi_core.plan.parallel_plan import ParallelPlan
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
def engine_of(model, size):
    return hyfi_core.parallelize(model, (1, 3, size, size), plan, hyfi_core.init(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters), verify=False)  # what it frees would be taken again
def step(engine, size):
    engine.train_step(torch.rand(1, 3, size, size), torch.tensor([0]))
model, plan, size = resnet18(classes=2).train(), ParallelPlan(grids=((1, 1),)), int(sys.argv[1])
step(engine_of(resnet18(classes=2, width=8).train(), 64), 64)  # code that a process loads once is not a step's memory
forecast = forecast_memory(capture(model, (1, 3, size, size), torch.float32), plan)
(peak,), (least,) = rank_peaks(plan, forecast), rank_peaks(plan, forecast, "least")
engine = engine_of(model, size)
before = status("VmRSS")
step(engine, size)
step(engine, size)
weights = sum(p.numel() * 4 for p in model.parameters())
print((status("VmHWM") - before + weights) / peak, least / peak)
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_step_takes_about_what_was_forecast() -> None:
    command = [sys.executable, "-c", MEASURE, "768"]
    environment = os.environ | RANK_SETTINGS  # of the allocator, as hyfi train starts its ranks
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    real, least = map(float, done.stdout.splitlines()[-1].split())
    assert 0.95 < real < 1.45 and least < real


def test_an_amount_that_is_named_is_enough() -> None:
    assert [enough_gb(n) for n in (1_000_000_001, 590_412_345, 45_000_000_000, 7)] == ["1.001", "0.5905", "45", "7e-09"]
    assert all(float(enough_gb(n)) * 1e9 >= n * (1 - 1e-12) for n in range(1, 10**12, 10**10 + 12_345_677))
