from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.cost.memory import MemoryForecast, enough_gb, forecast_memory
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.launch.launch import RANK_SETTINGS

ROOT = Path(__file__).parents[3]
PX = 32


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.second(self.first(images)).mean((2, 3)))
        return answer


def forecast(**plan: object) -> tuple[MemoryForecast, ...]:
    program = capture(Network().train(), (1, 3, PX, PX), torch.float32)
    return forecast_memory(program, ParallelPlan(**plan))  # type: ignore[arg-type]


def test_what_backward_needs_again_is_counted_once() -> None:
    (found,) = forecast(grids=((1, 1),))
    plane = PX * PX * 4
    # The image, the first relu's result (the next convolution's input), both results around the norm, the means.
    assert found.saved_bytes == (3 + 4 + 8 + 8) * plane + 8 * 4
    weights = sum(p.numel() * 4 for p in Network().parameters())
    assert found.state_bytes == 4 * weights
    assert found.working_bytes >= 16 * plane
    assert found.total_bytes > found.at_least_bytes == found.saved_bytes + found.state_bytes


def test_parts_divide_activations_and_not_weights() -> None:
    (one,), (four,) = forecast(grids=((1, 1),)), forecast(grids=((2, 2),))
    assert four.saved_bytes == one.saved_bytes // 4 and four.state_bytes == one.state_bytes


def test_stages_hold_what_is_theirs_of_all_micro_batches_in_flight() -> None:
    grids, plane = ((1, 1), (1, 1)), PX * PX * 4
    first, second = forecast(grids=grids, cuts=("first",), microbatches=4, schedule="1f1b")
    assert first.saved_bytes == 2 * (3 + 4) * plane and second.saved_bytes == (4 + 8 + 8) * plane + 8 * 4
    first, _ = forecast(grids=grids, cuts=("first",), microbatches=4, schedule="gpipe")
    assert first.saved_bytes == 4 * (3 + 4) * plane
    first, _ = forecast(grids=grids, cuts=("first",), microbatches=4, schedule="gpipe", recompute=True)
    assert first.saved_bytes == (3 + 4) * plane + 3 * 3 * plane


MEASURE = """
import sys, torch, hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.cost.memory import forecast_memory
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
(forecast,) = forecast_memory(capture(model, (1, 3, size, size), torch.float32), plan)
engine = engine_of(model, size)
before = status("VmRSS")
step(engine, size)
step(engine, size)
weights = sum(p.numel() * 4 for p in model.parameters())
print((status("VmHWM") - before + weights) / forecast.total_bytes, forecast.at_least_bytes / forecast.total_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_step_takes_about_what_was_forecast() -> None:
    command = [sys.executable, "-c", MEASURE, "768"]
    environment = os.environ | RANK_SETTINGS  # of the allocator, as hyfi train starts its ranks
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    real, least = map(float, done.stdout.splitlines()[-1].split())
    assert 0.7 < real < 1.3 and least < real


def test_an_amount_that_is_named_is_enough() -> None:
    assert [enough_gb(n) for n in (1_000_000_001, 590_412_345, 45_000_000_000, 7)] == ["1.001", "0.5905", "45", "7e-09"]
    assert all(float(enough_gb(n)) * 1e9 >= n * (1 - 1e-12) for n in range(1, 10**12, 10**10 + 12_345_677))
