"""Benchmark of forecasts: ``hyfi simulate`` against measured steps, on two ranks with one thread each.

    python -m workflows.benchmarks.forecast [--size 256] [--steps 5] [--machine machine.yaml]

Prints a JSON line for each plan of three networks (one rank or two; grids, stages, schedules, replicas, recomputation,
cells): predicted seconds, measured seconds (of the shortest step, which other processes disturb least), and their
ratio. The last line has the median and the worst error, and the rank correlation. Without ``--machine``, the machine is
measured first, as by ``hyfi doctor --measure``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.cuts import with_cuts
from hyfi_core.cost.machine import MachineModel, load_machine
from hyfi_core.cost.simulator import forecast_step
from hyfi_core.models import resnet
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.commands.measure import measure
from workflows.launch.launch import RANK_SETTINGS
from workflows.launch.mpiexec import find

_ONE, _TWO = ((1, 1),), ((1, 1), (1, 1))
PLANS = (
    ParallelPlan(grids=_ONE),
    ParallelPlan(grids=_ONE, recompute=True),
    ParallelPlan(grids=_ONE, cells=(2, 1)),
    ParallelPlan(grids=((1, 2),)),
    ParallelPlan(grids=((2, 1),), fused_halo=1),
    ParallelPlan(grids=_ONE, replicas=2),
    ParallelPlan(grids=_TWO, schedule="sequential"),
    ParallelPlan(grids=_TWO, microbatches=2),
    ParallelPlan(grids=_TWO, microbatches=2, schedule="chimera"),
)
BATCH = 2
MODELS = ("resnet6", "resnet18", "resnet50")


def main() -> None:
    """Start two ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--machine")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        _compare(hyfi_core.init(), given)
        return
    command = [sys.executable, "-m", "workflows.benchmarks.forecast", "--rank", *sys.argv[1:]]
    subprocess.run(
        [*find().command(2), *command], env={**os.environ, **RANK_SETTINGS, "OMP_NUM_THREADS": "1"}, check=True
    )


def _compare(comm: Communicator, given: argparse.Namespace) -> None:
    machine = load_machine(given.machine) if given.machine else measure(comm, Path.cwd())[0]
    pairs = []
    for name in given.models:
        for plan in PLANS:
            measured_s = _measured_s(comm, name, plan, given)
            if comm.rank:
                continue
            predicted_s = _predicted_s(machine, name, plan, given.size)
            pairs.append((predicted_s, measured_s))
            line = {"model": name, "plan": _short(plan), "predicted_s": predicted_s, "measured_s": measured_s}
            print(json.dumps({**line, "ratio": round(predicted_s / measured_s, 3)}), flush=True)
    if comm.rank == 0:
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
        order = float(spearmanr([p for p, _ in pairs], [m for _, m in pairs]).statistic)
        found = {"median_error": statistics.median(errors), "worst_error": max(errors), "rank_correlation": order}
        print(json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)


def _predicted_s(machine: MachineModel, name: str, plan: ParallelPlan, size: int) -> float:
    model = getattr(resnet, name)(classes=2).train()
    images = BATCH // plan.replicas // plan.microbatches
    program = capture(model, (images, 3, size, size), torch.float32)
    return forecast_step(program, with_cuts(plan, program), machine).step_s


def _measured_s(comm: Communicator, name: str, plan: ParallelPlan, given: argparse.Namespace) -> float:
    """Return the seconds of the shortest step; if the plan has one rank, the second waits."""
    found = 0.0
    if comm.rank < plan.ranks:
        torch.manual_seed(0)
        model = getattr(resnet, name)(classes=2).to(memory_format=torch.channels_last).train()
        shape = (BATCH // plan.replicas, 3, given.size, given.size)
        group = comm if plan.ranks == comm.size else AloneCommunicator()
        engine = hyfi_core.parallelize(
            model,
            shape,
            plan,
            group,
            loss=F.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
            verify=False,
        )
        images = torch.rand(shape).contiguous(memory_format=torch.channels_last)
        labels = torch.zeros(shape[0], dtype=torch.long)
        times = []
        for _ in range(given.steps + 1):
            group.barrier()
            begin = time.perf_counter()
            engine.train_step(images, labels)
            times.append(time.perf_counter() - begin)
        found = min(times[1:])
    comm.barrier()
    return found


def _short(plan: ParallelPlan) -> str:
    fields, defaults = plan.to_json(), ParallelPlan(grids=_ONE).to_json()
    return ", ".join(f"{key} {value}" for key, value in fields.items() if key == "grids" or value != defaults[key])


if __name__ == "__main__":
    main()
