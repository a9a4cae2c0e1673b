"""A model of a user's own, and what can go wrong around it; ``HYFI_TEST_FAULT`` is read by tests' ranks alone."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


def tiny(classes: int, norm: str = "train", pool: str = "avg", width: int = 8) -> nn.Module:
    """Return a network of three convolutions, stride 8: quick to capture, with norm, pooling and a head."""
    return Tiny(classes, norm, width)


def dropping(classes: int, norm: str = "train", pool: str = "avg", width: int = 8) -> nn.Module:
    """Return ``tiny`` with dropout before its head."""
    return Tiny(classes, norm, width, drop=0.5)


class Tiny(nn.Module):
    def __init__(self, classes: int, norm: str, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(drop)
        self.conv1 = nn.Conv2d(3, width, 5, stride=2, padding=2, bias=False)
        self.norm1 = nn.GroupNorm(2, width) if norm == "group" else nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.nn.functional.max_pool2d(torch.relu(self.conv2(x)), 3, 2, 1)
        return self.fc(self.drop(x.mean((2, 3))))


def faulty(classes: int, norm: str = "train", pool: str = "avg", width: int = 8) -> nn.Module:
    """Return ``tiny`` on a rank to which ``HYFI_TEST_FAULT=<rank>:<call>:<method>:<kind>`` happens.

    At the ``call``-th call of the engine's ``method`` the rank raises, dies, hangs, runs out of memory, or can
    write small files only;
    ``slow`` makes each call last ``call`` times 0.2 s, ``slow_until_requeued`` until Slurm has started the job again.
    """
    fault = os.environ.get("HYFI_TEST_FAULT")
    if fault and not (fault.endswith(":slow_until_requeued") and "SLURM_RESTART_COUNT" in os.environ):
        rank, call, method, kind = fault.split(":")
        if rank == _rank():
            _break("update_unread" if method == "update" else method, int(call), kind)  # which the loop calls
    return tiny(classes, norm, pool, width)


def _rank() -> str:
    """Return the rank that this process is, or is a child of; children know nothing of ranks, their parents do."""
    if "PMI_RANK" in os.environ:
        return os.environ["PMI_RANK"]
    lines = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode().split("\0")
    return next((line.removeprefix("PMI_RANK=") for line in lines if line.startswith("PMI_RANK=")), "0")


def _break(method: str, call: int, kind: str) -> None:
    from hyfi_core.runtime.engine import Engine

    whole = getattr(Engine, method)
    calls = 0

    def broken(self: Engine, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if kind.startswith("slow"):
            time.sleep(0.2 * max(1, call))
        elif calls == call and kind == "raise":
            raise RuntimeError("the fault that this test asked for")
        elif calls == call and kind == "memory":
            torch.empty(2**61, dtype=torch.uint8)
        elif calls == call and kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        elif calls == call and kind == "hang":
            time.sleep(10_000)
        elif calls == call and kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *args, **kwargs)

    setattr(Engine, method, broken)
