"""Benchmark of forecasts: ``hyfi simulate`` against measured steps, on one to four ranks with one thread each.

    python -m workflows.benchmarks.forecast [--size 256] [--steps 4] [--rounds 2] [--models resnet18 …] [--machine FILE]
    python -m workflows.benchmarks.forecast --sleeping        eight ranks that sleep instead of computing

Prints a JSON line for each plan (grids, stages, schedules, replicas, branches, recomputation, cells): predicted and
measured seconds of a step and their ratio, the same for the memory of the rank that needs most, and whether the planner
chose the plan. A line for each network compares the measured step of the planner's choice with the shortest of all
measured steps; the last line has the median and the worst errors, and the rank correlation of the steps.

All plans of a network are measured in each round, and the shortest step counts, because other work of the machine only
adds; of the memory, the median counts.

Without ``--machine``, the machine is measured first, as by ``hyfi doctor --measure`` with four ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from scipy.stats import spearmanr

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.cuts import with_cuts
from hyfi_core.cost.machine import MachineModel, load_machine
from hyfi_core.cost.plan_family import PlanRequest
from hyfi_core.cost.planner import best_plans
from hyfi_core.cost.simulator import StepForecast, forecast_step
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.benchmarks.forecast.cases import BATCH, NETWORKS, PLANS, label
from workflows.benchmarks.forecast.sleeping import compare_sleeping
from workflows.launch.launch import RANK_SETTINGS, launch_program
from workflows.launch.mpiexec import find

RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Comparison:
    """A plan's forecast and its measurement.

    Attributes:
        model: name of the network.
        forecast: of the plan.
        step_s: measured.
        grown_bytes: measured, of the rank that needs most.
        chosen: whether the planner chose this plan.
    """

    model: str
    forecast: StepForecast
    step_s: float
    grown_bytes: int
    chosen: bool

    @property
    def step_error(self) -> float:
        """Relative error of the predicted step."""
        return abs(self.forecast.step_s / self.step_s - 1)

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted memory of the rank that needs most."""
        return abs(max(self.forecast.resident_bytes) / self.grown_bytes - 1)

    def to_json(self) -> str:
        """Return one line."""
        predicted, grown = max(self.forecast.resident_bytes), self.grown_bytes
        return json.dumps(
            {
                "model": self.model,
                "ranks": self.forecast.plan.ranks,
                "plan": label(self.forecast.plan),
                "chosen": self.chosen,
                "predicted_s": round(self.forecast.step_s, 4),
                "measured_s": round(self.step_s, 4),
                "ratio": round(self.forecast.step_s / self.step_s, 3),
                "predicted_mb": round(predicted / 1e6),
                "measured_mb": round(grown / 1e6),
                "memory_ratio": round(predicted / grown, 3),
            }
        )


def main() -> None:
    """Measure the machine and all plans, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), choices=RANKS)
    parser.add_argument("--machine", help="name or file of a machine; without it, this one is measured")
    parser.add_argument("--sleeping", action="store_true")
    given = parser.parse_args()
    if given.sleeping:
        compare_sleeping(given.steps)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = load_machine(given.machine) if given.machine else _measured_machine()
    found = [case for name in given.models for case in _compare(name, given, machine)]
    errors, memory = [case.step_error for case in found], [case.memory_error for case in found]
    steps = [(case.forecast.step_s, case.step_s) for case in found]
    order = float(spearmanr(*zip(*steps, strict=True)).statistic) if len(found) > 1 else 1.0
    last = {
        "plans": len(found),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rank_correlation": order,
        "median_memory_error": statistics.median(memory),
        "worst_memory_error": max(memory),
    }
    print(json.dumps({name: round(value, 3) for name, value in last.items()}), flush=True)


def _measured_machine() -> MachineModel:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "machine.yaml"
        program = [sys.executable, "-m", "workflows.commands.measure", str(target)]
        if launch_program(program, max(RANKS)):
            sys.exit("the machine could not be measured")
        print(target.read_text(), file=sys.stderr, flush=True)
        return load_machine(target)


def _compare(name: str, given: argparse.Namespace, machine: MachineModel) -> list[Comparison]:
    """Forecast and measure the plans of one network and the planner's choice; print a line for each."""

    @cache
    def program(images: int) -> Program:
        return capture(NETWORKS[name]().train(), (images, 3, given.size, given.size), torch.float32)

    def resolved(plan: ParallelPlan) -> ParallelPlan:
        return with_cuts(plan, program(BATCH // plan.replicas // plan.microbatches), machine)

    requests = [PlanRequest(ranks, BATCH, machine, machine.memory_bytes) for ranks in given.ranks]
    best = min((best_plans(program, request).plans[0] for request in requests), key=lambda found: found.step_s)
    listed = [resolved(plan) for plan in PLANS[name] if plan.ranks in given.ranks]
    plans = list(dict.fromkeys([*listed, best.plan]))
    rounds = [[_measured(name, plan, given) for plan in plans] for _ in range(given.rounds)]
    cases = []
    for plan, found in zip(plans, zip(*rounds, strict=True), strict=True):
        forecast = forecast_step(program(BATCH // plan.replicas // plan.microbatches), plan, machine)
        grown = statistics.median(max(grown) for _, grown in found)
        cases.append(Comparison(name, forecast, min(step_s for step_s, _ in found), int(grown), plan == best.plan))
        print(cases[-1].to_json(), flush=True)
    shortest_s, choice_s = min(case.step_s for case in cases), next(case.step_s for case in cases if case.chosen)
    line = {
        "model": name,
        "planner_s": choice_s,
        "shortest_s": shortest_s,
        "planner_to_shortest": choice_s / shortest_s,
    }
    print(json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in line.items()}), flush=True)
    return cases


def _measured(name: str, plan: ParallelPlan, given: argparse.Namespace) -> tuple[float, tuple[int, ...]]:
    """Return the seconds of a step, and the growth of each rank of a replica in bytes."""
    words = name, json.dumps(plan.to_json()), str(given.size), str(given.steps)
    command = [*find().command(plan.ranks), sys.executable, "-m", "workflows.benchmarks.forecast.rank", *words]
    done = subprocess.run(command, env={**os.environ, **RANK_SETTINGS}, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found["step_s"], tuple(found["grown_bytes"])


if __name__ == "__main__":
    main()
