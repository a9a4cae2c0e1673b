"""Benchmark of overlap: how much of the messages' latency is hidden behind computation.

    python -m workflows.benchmarks.overlap [--size 1024] [--latency-ms 4] [--steps 3] [--resting-ms 0]

Two ranks with one thread each, ResNet-18, batch 1, float32, channels-last. Each message arrives ``--latency-ms`` after
it was sent, which is less than the time of a convolution of a rank's part. Prints a JSON line for forward (a
prediction) and one for a training step, with and without overlap:

    hidden           fraction of the injected latency during which no rank waited
    left_in_step     by how much latency makes the step longer, as a fraction of the injected latency

This needs an idle machine: ranks that compete for cores wait for each other, which also hides latency. On a busy
machine use a small ``--size`` and ``--resting-ms``, by which each convolution of a rank's part takes longer, sleeping.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar
from unittest import mock

import torch

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.delayed import DelayedCommunicator, Latency
from hyfi_core.models import resnet
from hyfi_core.ops.convolution import Convolution
from workflows.evaluation.models import convert_model
from workflows.launch.launch import RANK_SETTINGS
from workflows.launch.mpiexec import find_mpiexec

T = TypeVar("T")


class SleepingConvolution(Convolution):
    """A convolution that additionally sleeps when it computes the rank's part (not its border strips)."""

    seconds: ClassVar[float] = 0.0

    def _convolve(self, tensor: torch.Tensor, *bias: Any) -> torch.Tensor:
        time.sleep(self.seconds if tensor.shape[3] > 1 else 0.0)
        return super()._convolve(tensor, *bias)

    def _differentiate(self, back: Any, mask: Any) -> Any:
        time.sleep(sum(mask[:2]) * self.seconds if back.saved.conv_input.shape[3] > 1 else 0.0)
        return super()._differentiate(back, mask)


def main() -> None:
    """Start two ranks, which measure steps with and without overlap, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--latency-ms", type=float, default=4.0, help="of each message")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--resting-ms", type=float, default=0.0, help="how long each convolution also sleeps")
    args = parser.parse_args()
    if "HYFI_OVERLAP_RANK" in os.environ:
        SleepingConvolution.seconds = args.resting_ms / 1000
        _compare(args.size, args.latency_ms / 1000, args.steps)
        return
    environment = os.environ | RANK_SETTINGS | {"OMP_NUM_THREADS": "1", "HYFI_OVERLAP_RANK": "1"}
    command = [*find_mpiexec().command(2), sys.executable, "-m", "workflows.benchmarks.overlap", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def _compare(size: int, latency_s: float, steps: int) -> None:
    """Measure how much of the messages' latency computation hides, with and without overlap; rank 0 prints it.

    It prints one line for a prediction and one for a training step.
    """
    comm, latency = hyfi_core.init(), Latency(0.0)
    # The delayed communicator is used without latency, too, so that its own cost is in both times.
    runs = {overlapped: _runs(DelayedCommunicator(comm, latency), size, overlapped) for overlapped in (True, False)}
    for phase in ("forward", "step"):
        with_overlap, without = (
            _measured(runs[overlapped][phase], latency, latency_s, comm, steps) for overlapped in (True, False)
        )
        line = {"what": phase, "size_px": size, "latency_ms": latency_s * 1000, "seconds": with_overlap["seconds"]}
        for key in ("hidden", "left_in_step"):
            line |= {key: with_overlap[key], f"{key}_without_overlap": without[key]}
        if comm.rank == 0:
            print(json.dumps({key: round(x, 3) if isinstance(x, float) else x for key, x in line.items()}), flush=True)


def _runs(comm: DelayedCommunicator, size: int, overlapped: bool) -> dict[str, Callable[[], object]]:
    """Return the calls to time: a prediction and a training step; without overlap, convolutions wait for their halo."""
    torch.manual_seed(0)
    model = convert_model(resnet.resnet18(2), "float32", "channels_last")
    images = torch.randn(1, 3, size, size).contiguous(memory_format=torch.channels_last)
    plan = hyfi_core.ParallelPlan(grids=((1, 2),), fused_halo=1)
    # `apart`: compute the rank's part while messages are on their way, and the border strips later.
    convolution = functools.partial(SleepingConvolution, apart=overlapped)

    def run(call: Callable[[], T]) -> T:
        # Patched during calls, too: the engine makes its convolutions at the first of them.
        with mock.patch("hyfi_core.rules.windows.overlap.Convolution", convolution):
            return call()

    engine = run(lambda: hyfi_core.parallelize(model, (1, 3, size, size), plan, comm))
    labels = torch.tensor([1])

    def step() -> float:
        model.zero_grad()
        return run(lambda: engine.accumulate(images, labels))

    return {"forward": lambda: run(lambda: engine.predict(images)), "step": step}


def _measured(
    run: Callable[[], object], latency: Latency, late_s: float, comm: Communicator, steps: int
) -> dict[str, float]:
    """Run with and without latency in turns; return seconds without it, and how much of it was hidden.

    ``hidden`` is that of the rank that hid least.
    """
    run()  # captures the model and fills caches
    times: dict[float, list[float]] = {0.0: [], late_s: []}
    latency.injected_s = latency.visible_s = 0.0
    # In turns, as the machine may be slower for a while.
    for latency.seconds in [0.0, late_s] * steps:
        comm.barrier()
        start_s = time.perf_counter()
        run()
        times[latency.seconds].append(time.perf_counter() - start_s)
    latency.seconds = 0.0
    hidden = torch.tensor([1.0 - latency.visible_s / latency.injected_s])
    # Ranks wait for different times: the one that hid least counts.
    comm.all_reduce(hidden, "min")
    longer_s = min(times[late_s]) - min(times[0.0])
    return {
        "seconds": min(times[0.0]),
        "hidden": float(hidden),
        # Divided by `steps`: latency was injected in one of two runs, so in `steps` of them.
        "left_in_step": longer_s / (latency.injected_s / steps),
    }


if __name__ == "__main__":
    main()
