"""The current GPU of a thread: CUDA has one for each, and a new thread starts with the first GPU, without a context."""

from __future__ import annotations

from collections.abc import Callable

import torch


def make_current(device: torch.device) -> None:
    """Make a GPU the current one of this thread, and create its context; every thread of ours calls this first.

    Args:
        device: device of the tensors that the thread computes or copies; nothing is done for a CPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def current_device() -> torch.device:
    """Return the current GPU of this thread, for threads that it starts; the CPU if the process uses no GPU."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_in_this_thread(device: torch.device) -> Callable[[], None]:
    """Return a function that sets the current GPU and stream of its calling thread to those of this thread.

    Threads that compute for this thread call it first: on another stream, their kernels could run before kernels whose
    results they read.

    Args:
        device: device of the tensors that the threads compute; for a CPU, the function does nothing.
    """
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.current_stream(device)

    def adopt() -> None:
        make_current(device)
        torch.cuda.set_stream(stream)

    return adopt
