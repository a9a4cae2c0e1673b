"""Time and memory of training steps on a device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes
from hyfi_core.runtime.calls.replayed_steps import UNRECORDED_STEPS

Row = dict[str, Any]
StepBody = Callable[[], object]
UNTIMED_STEPS = UNRECORDED_STEPS + 1
"""Steps that `step_s` takes before the timed ones: they compile, allocate, and record a CUDA graph."""


def finish(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_s(step: StepBody, device: torch.device, steps: int) -> float:
    """Return the median seconds of ``steps`` steps, after `UNTIMED_STEPS` others."""
    for _ in range(UNTIMED_STEPS):
        step()
    finish(device)
    times = []
    for _ in range(steps):
        begin_s = time.perf_counter()
        step()
        finish(device)
        times.append(time.perf_counter() - begin_s)
    # The median, so that single steps that other processes disturb do not count.
    return statistics.median(times)


def step_peak_bytes(step: StepBody, device: torch.device) -> int:
    """Return by how many bytes the peak memory of a step exceeds the memory before it."""
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        # Bytes of tensors rather than bytes that the allocator has reserved, which depend on earlier parts.
        before = torch.cuda.memory_allocated(device)
        step()
        return int(torch.cuda.max_memory_allocated(device)) - before
    # Without this, the kernel would report the peak of the whole life of the process.
    forget_peak()
    before = resident_bytes()
    step()
    return peak_bytes() - before


def free(device: torch.device) -> None:
    """Return unused memory to the device, as after a step that did not fit."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def tried(row_name: str, body: Callable[[], Row], device: torch.device) -> Row:
    """Return the row of ``body``; if it fails, free the device's memory and return a row with the reason."""
    try:
        return {"what": row_name, **body()}
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    free(device)
    return {"what": row_name, "failed": reason}
