"""The current GPU of a thread: CUDA has one for each, and a new thread starts with the first GPU, without a context."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Make a GPU the current one of this thread, and create its context; every thread of ours calls this first.

    Args:
        device: of what the thread computes or copies; nothing is done for a CPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def current_device() -> torch.device:
    """Return the current GPU of this thread, for threads that it starts; the CPU if the process uses no GPU."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
