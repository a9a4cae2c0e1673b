"""How much of the messages' latency disappears behind a rank's own work.

    python -m workflows.benchmarks.overlap [--size 1024] [--latency-ms 4] [--steps 3]

Two ranks, one thread each, ResNet-18, batch 1, float32, channels-last. Each message is there only some time after it
was sent; that is less than what a convolution takes on a rank's own part. Prints a JSON line for forward (a prediction) and
one for the whole training step:

    hidden       of the injected latency, what no rank sat out; exchanges of pools are not overlapped and count as seen
    step ratio   (late - prompt) / (late, nothing overlapped - prompt, nothing overlapped), in seconds of the whole step

The second asks for a quiet machine, the first does not.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.delayed import DelayedCommunicator, Latency
from hyfi_core.models import resnet
from hyfi_core.ops.convolution import Convolution
from workflows.mpiexec import find


def main() -> None:
    """Start two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--latency-ms", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    if "HYFI_OVERLAP_RANK" in os.environ:
        _compare(given.size, given.latency_ms / 1000, given.steps)
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1", "HYFI_OVERLAP_RANK": "1"}
    command = [*find().command(2), sys.executable, "-m", "workflows.benchmarks.overlap", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def _compare(size: int, latency_s: float, steps: int) -> None:
    comm, latency = hyfi_core.init(), Latency(0.0)
    late = DelayedCommunicator(comm, latency)
    found: dict[str, dict[tuple[bool, bool], tuple[float, float]]] = {"forward": {}, "step": {}}
    for overlapped in (True, False):
        runs = _runs(late, size, overlapped)
        for name, run in runs.items():
            run()  # warms caches and captures
            for seconds in (0.0, latency_s):
                latency.seconds = seconds
                found[name][overlapped, seconds > 0] = _measured(run, latency, comm, steps)
            latency.seconds = 0.0
    if comm.rank == 0:
        for name, results in found.items():
            gained = results[True, True][0] - results[True, False][0]
            paid = results[False, True][0] - results[False, False][0]
            print(
                json.dumps(
                    {
                        "what": name,
                        "size_px": size,
                        "latency_ms": latency_s * 1000,
                        "hidden": round(results[True, True][1], 3),
                        "hidden_without_overlap": round(results[False, True][1], 3),
                        "seconds": round(results[True, False][0], 3),
                        "seconds_late": round(results[True, True][0], 3),
                        "seconds_late_without_overlap": round(results[False, True][0], 3),
                        "step_ratio": round(gained / paid, 3),
                    }
                ),
                flush=True,
            )


def _runs(comm: DelayedCommunicator, size: int, overlapped: bool) -> dict[str, Callable[[], object]]:
    """Return a prediction and a training step; without overlap convolutions wait for their canvas."""
    torch.manual_seed(0)
    model = resnet.resnet18(2).to(memory_format=torch.channels_last)
    images = torch.randn(1, 3, size, size).contiguous(memory_format=torch.channels_last)
    plan = hyfi_core.ParallelPlan(grids=((1, 2),), fused_halo=1)
    made = Convolution if overlapped else functools.partial(Convolution, apart=False)

    def run(call: Callable[[], object]) -> object:
        with mock.patch("hyfi_core.graph.rules_overlap.Convolution", made):  # lowered at the first call
            return call()

    engine = run(lambda: hyfi_core.parallelize(model, (1, 3, size, size), plan, comm))  # type: ignore[arg-type]
    labels = torch.tensor([1])
    return {
        "forward": lambda: run(lambda: engine.predict(images)),  # type: ignore[attr-defined]
        "step": lambda: (model.zero_grad(), run(lambda: engine.accumulate(images, labels))),  # type: ignore[attr-defined]
    }


def _measured(run: Callable[[], object], latency: Latency, comm: Communicator, steps: int) -> tuple[float, float]:
    """Return (median seconds, share of the injected latency that was hidden on the rank that hid least)."""
    latency.injected_s = latency.visible_s = 0.0
    times = []
    for _ in range(steps):
        comm.barrier()
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    hidden = torch.tensor([1.0 - latency.visible_s / max(latency.injected_s, 1e-12)])
    comm.all_reduce(hidden, "min")
    return statistics.median(times), float(hidden)


if __name__ == "__main__":
    main()
