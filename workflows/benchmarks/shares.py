"""Benchmark of unequal shares: a slow replica with a share in proportion to its speed, or with an equal share.

    python -m workflows.benchmarks.shares [--slower 3] [--batch 8] [--steps 5]

Two replicas (threads of one process) that sleep for every sample; one sleeps ``--slower`` times as long. Three variants
with the same batch: the fast replica alone, both with equal shares, and both with shares by speed, which are measured
by the code of ``hyfi train``. Prints one JSON line; seconds are medians of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.plan.apportion import apportion
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.engine import Engine
from workflows.training.pace import seconds_of_a_turn

SAMPLE_S, SIZE_PX = 0.02, 16
_THREAD = threading.local()
"""Holds ``sleep_s`` of each rank, which is a thread: values in the loss itself would have to be equal on all ranks."""


def main() -> None:
    """Run each division of the batch; print the shares by speed, the times of steps and their ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    sleeps, half = (SAMPLE_S, args.slower * SAMPLE_S), args.batch // 2
    shares = apportion(args.batch, run_ranks(2, lambda comm: _pace(comm, sleeps))[0])
    sides = {"alone": (args.batch,), "equal": (args.batch - half, half), "by_speed": shares}
    seconds = {name: _step_s(side, sleeps, args.steps) for name, side in sides.items()}
    # The ideal: two replicas with speeds 1 and 1 / slower work all the time.
    least = seconds["alone"] / (1 + 1 / args.slower)
    ratios = {f"by_speed_to_{name}": round(seconds["by_speed"] / seconds[name], 3) for name in ("alone", "equal")}
    steps = {f"{name}_s": round(value, 4) for name, value in seconds.items()}
    print(json.dumps({"shares": shares, **steps, **ratios, "by_speed_to_least": round(seconds["by_speed"] / least, 3)}))


def _pace(comm: Communicator, sleeps: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds in which each replica computes one sample, measured by the code of ``hyfi train``."""
    group = comm.split(comm.rank)  # this rank alone: it is a replica
    assert group is not None
    engine, images, labels = _engine(group, (1,), sleeps[comm.rank])

    def turn(number: int) -> None:  # every turn has the same image
        engine.accumulate(images, labels)

    return seconds_of_a_turn(comm, comm.rank, turn)


def _step_s(shares: tuple[int, ...], sleeps: Sequence[float], steps: int) -> float:
    """Return the median seconds of a step of the slowest replica."""

    def body(comm: Communicator) -> float:
        """Return the median seconds of a step of this replica."""
        engine, images, labels = _engine(comm, shares, sleeps[comm.rank])
        seconds = []
        for _ in range(steps + 1):  # the first is not counted
            start_s = time.perf_counter()
            engine.accumulate(images, labels)
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[1:])

    # The step ends with the slowest replica.
    return max(run_ranks(len(shares), body))


def _engine(comm: Communicator, shares: tuple[int, ...], sleep_s: float) -> tuple[Engine, torch.Tensor, torch.Tensor]:
    """Return the engine, images and labels of a replica whose loss sleeps for each image."""
    _THREAD.sleep_s = sleep_s
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    shape = (shares[comm.rank], 3, SIZE_PX, SIZE_PX)
    plan = ParallelPlan(((1, 1),), replicas=len(shares), shares=shares)
    engine = hyfi_core.parallelize(model, shape, plan, comm, loss=_slow_loss)
    return engine, torch.zeros(shape), torch.zeros(shape[0], dtype=torch.long)


def _slow_loss(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy after sleeping for each sample, as long as this thread's rank sleeps."""
    time.sleep(_THREAD.sleep_s * len(labels))
    return nn.functional.cross_entropy(logits, labels)


if __name__ == "__main__":
    main()
