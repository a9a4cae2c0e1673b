"""Benchmark of gradient reduction: how much of it is hidden behind backward on a slow link.

    python -m workflows.benchmarks.reduction [--rounds 3]

Two replicas (threads of one process) that sleep instead of computing. The link carries one bucket after the other.
Three variants alternate: a link without cost, buckets sent during backward, all buckets after backward. Prints one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

import hyfi_core
from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Pending, ReduceOp
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime import gradients
from workflows.benchmarks.sleeping import SleepingNetwork

BLOCKS, BLOCK_S, SIZE_PX, CHANNELS = 16, 0.01, 16, 64
LINK_S = 0.24
"""Seconds of all gradients on the link: three quarters of backward."""


class _DelayedReduction:
    """A pending reduction that is not done before a given time."""

    def __init__(self, pending: Pending, done_s: float) -> None:
        self._pending, self._done_s = pending, done_s

    @property
    def needs_polls(self) -> bool:
        return self._pending.needs_polls

    def test(self) -> bool:
        return time.perf_counter() >= self._done_s and self._pending.test()

    def wait(self) -> None:
        time.sleep(max(0.0, self._done_s - time.perf_counter()))
        self._pending.wait()


class SlowLinkCommunicator(ForwardingCommunicator):
    """A communicator whose reductions follow one after the other on a slow link."""

    def __init__(self, comm: Communicator, seconds_per_byte: float) -> None:
        super().__init__(comm)
        self._seconds_per_byte, self._free_s = seconds_per_byte, 0.0

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start a reduction; it is done when the link has carried its bytes."""
        self._free_s = max(time.perf_counter(), self._free_s) + tensor.nbytes * self._seconds_per_byte
        return _DelayedReduction(self._comm.start_all_reduce(tensor, op), self._free_s)

    def split(self, color: int | None, key: int = 0) -> Any:
        """Return a subgroup with a link of the same speed."""
        group = self._comm.split(color, key)
        return None if group is None else SlowLinkCommunicator(group, self._seconds_per_byte)


def _step_s(link_s: float, overlapped: bool) -> float:
    def body(comm: Communicator) -> float:
        torch.manual_seed(0)
        model = SleepingNetwork(BLOCKS, BLOCK_S, SIZE_PX, CHANNELS)
        total = sum(p.numel() * 4 for p in model.parameters())
        slow: Any = SlowLinkCommunicator(comm, link_s / total)
        engine = hyfi_core.parallelize(model, (1, 3, SIZE_PX, SIZE_PX), ParallelPlan(((1, 1),), replicas=2), slow)
        images, labels = torch.zeros(1, 3, SIZE_PX, SIZE_PX), torch.zeros(1, dtype=torch.long)
        engine.accumulate(images, labels)
        begin = time.perf_counter()
        engine.accumulate(images, labels)
        return time.perf_counter() - begin

    def do_nothing(self: Any, parameters: Sequence[Any]) -> None:
        """Start no reduction during backward; all are started after it."""

    with mock.patch.object(gradients, "BUCKET_BYTES", 128 << 10):
        if overlapped:
            return max(run_ranks(2, body))
        with mock.patch.object(gradients.ReductionGroup, "complete", do_nothing):
            return max(run_ranks(2, body))


def main() -> None:
    """Run the variants in turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    sides = {"free": (0.0, True), "overlapped": (LINK_S, True), "after": (LINK_S, False)}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(_step_s(*side))
    seconds = {name: statistics.median(times) for name, times in found.items()}
    hidden = 1.0 - (seconds["overlapped"] - seconds["free"]) / (seconds["after"] - seconds["free"])
    print(json.dumps({**{f"{k}_s": round(v, 3) for k, v in seconds.items()}, "hidden": round(hidden, 3)}))


if __name__ == "__main__":
    main()
