"""Benchmark of forecasts: ``hyfi simulate`` against measured steps, on one to four ranks with one thread each.

    python -m workflows.benchmarks.forecast [--size 256] [--steps 4] [--rounds 2] [--models resnet18 …] [--machine FILE]
                                             [--precision bfloat16]
    python -m workflows.benchmarks.forecast --sleeping        eight ranks that sleep instead of computing

Prints a JSON line for each plan (grids, stages, schedules, replicas, branches, recomputation, cells): predicted and
measured seconds of a step and their ratio, the same for the memory of the rank that needs most (growth of its process,
and the peak of its tensors), and whether the planner chose the plan. A line for each network compares the measured
step of the planner's choice with the shortest of all measured steps; the last line has the median and the worst errors,
and the rank correlation of the steps.

All plans are measured in each round. The shortest step of a plan counts, because other work of the machine only adds
time; for the growth of processes, the median counts.

Without ``--machine``, each round begins with a measurement of the machine, as by ``hyfi doctor --measure`` with four
ranks, and a step is compared with the forecast for the machine of its round.
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

from hyfi_core.capture.autocast import under_autocast
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.planner import best_plans
from hyfi_core.cost.step.simulator import StepForecast, forecast_step
from hyfi_core.plan.parallel_plan import ParallelPlan
from workflows.benchmarks.forecast.cases import BATCH, NETWORKS, PLANS, label
from workflows.benchmarks.forecast.sleeping import compare_sleeping
from workflows.launch.launch import RANK_SETTINGS, launch_program
from workflows.launch.mpiexec import find_mpiexec

RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Comparison:
    """A plan's forecast and its measurement.

    Attributes:
        model: Name of the network.
        forecast: Forecast of the plan.
        step_s: Measured seconds of a step.
        grown_bytes: Growth of the process that grew most.
        allocated_bytes: Peak of the tensors of the rank that has most.
        chosen: Whether the planner chose this plan.
    """

    model: str
    forecast: StepForecast
    step_s: float
    grown_bytes: int
    allocated_bytes: int
    chosen: bool

    @property
    def step_error(self) -> float:
        """Relative error of the predicted step."""
        return abs(self.forecast.step_s / self.step_s - 1)

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted memory of the process that needs most."""
        return abs(max(self.forecast.resident_bytes) / self.grown_bytes - 1)

    @property
    def tensors_error(self) -> float:
        """Relative error of the predicted peak of tensors."""
        return abs(max(self.forecast.memory_bytes) / self.allocated_bytes - 1)

    def to_json(self) -> str:
        """Return one line."""
        predicted, grown = max(self.forecast.resident_bytes), self.grown_bytes
        tensors, allocated = max(self.forecast.memory_bytes), self.allocated_bytes
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
                "predicted_tensors_mb": round(tensors / 1e6),
                "measured_tensors_mb": round(allocated / 1e6),
                "tensors_ratio": round(tensors / allocated, 3),
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
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sleeping", action="store_true", help="compare forecasts of ranks that sleep instead")
    args = parser.parse_args()
    if args.sleeping:
        compare_sleeping(args.steps)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    studies: list[Study] = []
    for _ in range(args.rounds):
        machine = load_machine(args.machine) if args.machine else _measured_machine()
        studies = studies or [Study(name, args, machine) for name in args.models]
        for study in studies:
            study.measure(machine)
    cases = [case for study in studies for case in study.compared()]
    errors, memory = [case.step_error for case in cases], [case.memory_error for case in cases]
    tensors = [case.tensors_error for case in cases]
    steps = [(case.forecast.step_s, case.step_s) for case in cases]
    order = float(spearmanr(*zip(*steps, strict=True)).statistic) if len(cases) > 1 else 1.0
    last = {
        "plans": len(cases),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rank_correlation": order,
        "median_memory_error": statistics.median(memory),
        "worst_memory_error": max(memory),
        "median_tensors_error": statistics.median(tensors),
        "worst_tensors_error": max(tensors),
    }
    print(json.dumps({name: round(value, 3) for name, value in last.items()}), flush=True)


def _measured_machine() -> MachineModel:
    """Return the model of this machine as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "machine.yaml"
        program = [sys.executable, "-m", "workflows.commands.bench.measure", str(target)]
        if launch_program(program, max(RANKS)):
            sys.exit("the machine could not be measured")
        print(target.read_text(), file=sys.stderr, flush=True)
        return load_machine(target)


class Study:
    """The plans of one network and their measurements.

    Args:
        name: Name of the network.
        args: The options of the command.
        machine: The machine for which stages are cut and the planner chooses its plan.
    """

    def __init__(self, name: str, args: argparse.Namespace, machine: MachineModel) -> None:
        self._name, self._args = name, args
        self._dtype = None if args.precision == "float32" else args.precision
        self._program = cache(self._captured)  # by the number of images in a micro-batch
        requests = [PlanRequest(ranks, BATCH, machine, machine.memory_bytes, dtype=self._dtype) for ranks in args.ranks]
        fastest = (best_plans(self._program, request).plans[0] for request in requests)
        self._best = min(fastest, key=lambda best: best.step_s).plan
        listed = [with_cuts(plan, self._program_of(plan), machine) for plan in PLANS[name] if plan.ranks in args.ranks]
        # dict.fromkeys: the planner's choice may be listed already.
        self._plans = list(dict.fromkeys([*listed, self._best]))
        # Of each round: its machine, and for each plan (seconds, grown bytes, allocated bytes), see `_measured`.
        self._rounds: list[tuple[MachineModel, list[tuple[float, int, int]]]] = []

    def measure(self, machine: MachineModel) -> None:
        """Measure all plans once, on a machine that was measured just before."""
        self._rounds.append((machine, [_measured(self._name, plan, self._args) for plan in self._plans]))

    def compared(self) -> list[Comparison]:
        """Print a line for each plan and one for the planner's choice, and return the comparisons."""
        cases = [self._case(index, plan) for index, plan in enumerate(self._plans)]
        shortest_s, choice_s = min(case.step_s for case in cases), next(case.step_s for case in cases if case.chosen)
        seconds = {"planner_s": choice_s, "shortest_s": shortest_s, "planner_to_shortest": choice_s / shortest_s}
        print(json.dumps({"model": self._name, **{key: round(x, 4) for key, x in seconds.items()}}), flush=True)
        return cases

    def _case(self, index: int, plan: ParallelPlan) -> Comparison:
        """Print and return the comparison of a plan's forecast with its measurements."""
        rounds = [(machine, *of_plans[index]) for machine, of_plans in self._rounds]
        # The round of the shortest step, and the machine as it was measured at the start of that round.
        machine, step_s, _, allocated = min(rounds, key=lambda of_round: of_round[1])
        grown = statistics.median(grown for _, _, grown, _ in rounds)
        forecast = forecast_step(self._program_of(plan), plan, machine, self._dtype)
        case = Comparison(self._name, forecast, step_s, int(grown), allocated, plan == self._best)
        print(case.to_json(), flush=True)
        return case

    def _program_of(self, plan: ParallelPlan) -> Program:
        return self._program(BATCH // plan.replicas // plan.microbatches)

    def _captured(self, images: int) -> Program:
        size = self._args.size
        program = capture(NETWORKS[self._name]().train(), (images, 3, size, size), torch.float32)
        return program if self._dtype is None else under_autocast(program, torch.bfloat16, "cpu")


def _measured(name: str, plan: ParallelPlan, args: argparse.Namespace) -> tuple[float, int, int]:
    """Return (seconds of a step, bytes of the process that grows most, peak bytes of tensors of the largest rank)."""
    words = name, json.dumps(plan.to_json()), str(args.size), str(args.steps), args.precision
    command = [*find_mpiexec().command(plan.ranks), sys.executable, "-m", "workflows.benchmarks.forecast.rank", *words]
    completed = subprocess.run(
        command, env={**os.environ, **RANK_SETTINGS}, stdout=subprocess.PIPE, text=True, check=True
    )
    measured = json.loads(completed.stdout.strip().splitlines()[-1])
    return measured["step_s"], max(measured["grown_bytes"]), max(measured["allocated_bytes"])


if __name__ == "__main__":
    main()
