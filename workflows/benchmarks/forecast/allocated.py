"""The memory of tensors that a step allocates, by PyTorch's profiler, without freed memory that the heap keeps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def peak_of(step: Callable[[], Any]) -> int:
    """Return the peak bytes of CPU tensors during a step, in addition to those that exist when it begins."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    # An event that frees memory has negative bytes: the running sum is what is allocated.
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = most = 0
    for _, change in changes:
        total += change
        most = max(most, total)
    return most


def held_bytes() -> int:
    """Return the bytes of all CPU tensors that exist; tensors that share memory count once."""
    # Cycles of unused objects keep tensors until the garbage collector runs.
    gc.collect()
    tensors = [
        tensor
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"
    ]
    storages = [tensor.untyped_storage() for tensor in tensors]
    # By address, as views share their storage.
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
