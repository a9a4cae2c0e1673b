"""Part of a check: profiles of a step of plain PyTorch and of the engine, and the calls that the engine adds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity

from workflows.gpu_check.measure_step import Row, StepBody, finish, free
from workflows.gpu_check.setting import Setting
from workflows.gpu_check.speed import engine_step, plain_step

COUNTED = ("aten::copy_", "aten::detach", "aten::empty_strided", "aten::clone", "cudaLaunchKernel", "cudaMemcpyAsync")
_ROWS = 60


def profile(setting: Setting, side: str) -> Iterator[Row]:
    """Yield counts of calls in the third step of plain PyTorch and of the engine; ``profiles`` gets their tables."""
    folder = setting.out / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, dict[str, int]] = {}
    sides = {
        "eager": partial(plain_step, setting, int(side)),
        "engine": partial(engine_step, setting, int(side), cuda_graphs="off"),
    }
    for name, make in sides.items():
        table, counts[name] = _profiled(make(), setting.device)
        (folder / f"{name}-{side}.txt").write_text(table)
        free(setting.device)
    for call in COUNTED:
        yield {"what": f"{call}, calls in a step", **{name: counted.get(call, 0) for name, counted in counts.items()}}


def _profiled(step: StepBody, device: torch.device) -> tuple[str, dict[str, int]]:
    """Return (table, call -> number of calls) of a step."""
    step()
    step()
    finish(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as run:
        step()
        finish(device)
    averages = run.key_averages()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return averages.table(sort_by=order, row_limit=_ROWS), {event.key: event.count for event in averages}
