"""Benchmark of the dimensions of parallelism: layer, pipeline, spatial, two directions, replicas, and combinations.

    python -m workflows.benchmarks.dimensions [--out DIR] [--steps 3]       eight ranks that sleep instead of computing
    python -m workflows.benchmarks.dimensions --branches                    four ranks with two images, likewise
    python -m workflows.benchmarks.dimensions --zero-bubble                 four ranks; weights' gradients sleep apart
    python -m workflows.benchmarks.dimensions --real [--size 1024]          two ranks that train ResNet-18

Prints a table. With ``--out``, the first also writes, for each plan, ``NAME.json`` (a trace for Perfetto) and
``NAME.svg`` (a timeline of all ranks).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.models.resnet import resnet18
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.engine import Engine
from hyfi_core.schedule.picture import draw
from hyfi_core.schedule.simulate import simulate
from hyfi_core.schedule.trace import TraceEvent, bubble, to_json
from workflows.benchmarks.reduction import Sleep, SleepingNetwork, SleepingProduct
from workflows.evaluation.models import convert_model
from workflows.launch.mpiexec import find_mpiexec

BLOCKS, BLOCK_S, SIZE_PX, BATCH = 16, 0.02, 32, 8
LONG_BLOCK_S = 0.06
ONE = (1, 1)
_RANK_SETTING = "HYFI_BENCHMARK"
"""Environment variable of the ranks that this program starts."""


def _plans() -> dict[str, ParallelPlan]:
    """Return plans for eight ranks; in each plan all ranks have the same work."""
    # Eight stages of two blocks each; or the first half of the blocks on a grid, then four stages of two blocks.
    eight = tuple(f"blocks.{n}" for n in range(1, BLOCKS - 1, 2))
    after_grid = ("blocks.7", "blocks.9", "blocks.11", "blocks.13")
    plans = {
        "layer": ParallelPlan((ONE,) * 8, eight, BATCH, "sequential"),
        "pipeline, gpipe": ParallelPlan((ONE,) * 8, eight, BATCH, "gpipe"),
        "pipeline, 1f1b": ParallelPlan((ONE,) * 8, eight, BATCH, "1f1b"),
        "spatial, 2 x 4": ParallelPlan(((2, 4),), microbatches=BATCH),
        "spatial + pipeline": ParallelPlan(((2, 2), ONE, ONE, ONE, ONE), after_grid, BATCH, "1f1b"),
        "two directions, gems_master": ParallelPlan((ONE,) * 8, eight, BATCH, "gems_master"),
        "two directions, chimera": ParallelPlan((ONE,) * 8, eight, BATCH, "chimera"),
        "all five": ParallelPlan(((1, 2), ONE, ONE), ("blocks.7", "blocks.11"), BATCH // 2, "chimera", replicas=2),
    }
    assert all(plan.ranks == 8 for plan in plans.values())
    return plans


def main() -> None:
    """Start the ranks, or run as one of them.

    The program starts itself again as each rank: with ``--plan`` for ResNet-18, with `_RANK_SETTING` in the environment
    for the networks that sleep.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for traces and timelines")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="train ResNet-18 instead of a network that sleeps")
    parser.add_argument("--branches", action="store_true", help="compare plans for a network with parallel branches")
    parser.add_argument("--zero-bubble", action="store_true", help="compare 1f1b with zb_h1")
    parser.add_argument("--size", type=int, default=1024, help="pixels of a side of ResNet-18's images")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan is not None:
        _resnet_rank(json.loads(args.plan), args.size, args.steps)
    elif args.real:
        _compare_resnet(args.size, args.steps)
    elif _RANK_SETTING not in os.environ:
        _start(4 if args.branches or args.zero_bubble else 8, sys.argv[1:])
    elif args.branches:
        _branching_rank(args.steps)
    elif args.zero_bubble:
        compare_divided(hyfi_core.init(), args.out, args.steps)
    else:
        _sleeping_rank(args.out, args.steps)


def _start(ranks: int, arguments: list[str]) -> None:
    """Run this program with ``arguments`` on ranks of mpiexec, of one thread each."""
    command = [*find_mpiexec().command(ranks), sys.executable, "-m", "workflows.benchmarks.dimensions", *arguments]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1", _RANK_SETTING: "1"}, check=True)


def _sleeping_rank(out: Path | None, steps: int) -> None:
    """Time a sleeping network with each plan; all eight ranks call this, and rank 0 prints a table."""
    comm = hyfi_core.init()
    torch.manual_seed(0)
    if comm.rank == 0:
        sleep_ms = f"{BLOCK_S * 1e3:.0f} ms"
        print(f"8 ranks, batch {BATCH}; a block sleeps {sleep_ms} per image in forward, twice that in backward")
        print("| plan | step (s) | to layer | bubble | simulated | in flight | stage KB | halo KB | reduce KB |")
        print("|---|---|---|---|---|---|---|---|---|")
    layer_s = 0.0
    for name, plan in _plans().items():
        seconds, engine = _timed(comm, plan, SleepingNetwork(BLOCKS, BLOCK_S, SIZE_PX), steps)
        # The first plan is layer parallelism, to which the others are compared.
        layer_s = layer_s or seconds
        events = _gathered(comm, engine)
        traffic = comm.gather_objects(engine.traffic())
        if events is not None and traffic is not None:
            _print_row(name, plan, engine, events, traffic, seconds, layer_s)
            _write_timeline(out, name, events)


def compare_divided(comm: Communicator, out: Path | None, steps: int) -> None:
    """Compare 1f1b with zb_h1, whose backwards have two parts, on four stages; rank 0 prints a table."""
    torch.manual_seed(0)
    cuts = tuple(f"blocks.{n}" for n in range(1, 7, 2))
    if comm.rank == 0:
        print(f"4 ranks, batch {BATCH}; a block sleeps {LONG_BLOCK_S * 1e3:.0f} ms in forward, and for each gradient")
        print("| schedule | step (s) | bubble | simulated | waits of a rank (s) | by the formula | in flight |")
        print("|---|---|---|---|---|---|---|")
    for schedule in ("1f1b", "zb_h1"):
        plan = ParallelPlan((ONE,) * 4, cuts, BATCH, schedule)
        # A new network: after training in stages, no second engine can be made of it.
        seconds, engine = _timed(comm, plan, SleepingNetwork(8, LONG_BLOCK_S, SIZE_PX, sleep=SleepingProduct), steps)
        events = _gathered(comm, engine)
        if events is not None:
            dry_run = simulate(engine.schedule(), Placement.of(plan), [(s, s + 1) for s in range(3)])
            stage_s, measured = 2 * LONG_BLOCK_S, bubble(events)
            span_s = max(e.end_s for e in events) - min(e.start_s for e in events)
            # A rank of D stages waits (D - 1)(F + I + W) seconds in 1f1b, (D - 1)(F + I - W) in zb_h1. F, I and W are
            # the seconds of a stage's forward and of its gradients of inputs and weights, here all `stage_s`.
            formula_s = 3 * stage_s * (1 if plan.divides_backwards else 3)
            bubbles = f"{measured:.3f} | {dry_run.bubble:.3f} | {measured * span_s:.3f} | {formula_s:.3f}"
            print(f"| {schedule} | {seconds:.2f} | {bubbles} | {max(dry_run.peak_live)} |", flush=True)
            _write_timeline(out, schedule, events)


def _timed(
    comm: Communicator, plan: ParallelPlan, model: nn.Module, steps: int, batch_of_all_replicas: int = BATCH
) -> tuple[float, Engine]:
    """Return the median seconds of a step of ``model`` with this plan, and its engine."""
    batch = batch_of_all_replicas // plan.replicas
    engine = hyfi_core.parallelize(model, (batch, 3, SIZE_PX, SIZE_PX), plan, comm, verify=False)
    images, labels = torch.zeros(batch, 3, SIZE_PX, SIZE_PX), torch.zeros(batch, dtype=torch.long)
    return _median(comm, lambda: engine.accumulate(images, labels), steps), engine


def _median(comm: Communicator, step: Any, steps: int) -> float:
    """Return the median seconds of a step, after one that is not counted."""
    seconds = []
    step()
    for _ in range(steps):
        comm.barrier()
        begin = time.perf_counter()
        step()
        comm.barrier()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _gathered(comm: Communicator, engine: Engine) -> list[TraceEvent] | None:
    """Return the events of all ranks, the first at 0 s, on rank 0; None on other ranks."""
    mine = [[comm.rank, str(action), begin, end, str(action.verb)] for action, begin, end in engine.events]
    parts = comm.gather_objects(mine)
    if parts is None:
        return None
    # The times of ranks can be compared: on one host, all read the same clock.
    first = min(event[2] for part in parts for event in part)
    return [TraceEvent(r, name, b - first, e - first, kind) for part in parts for r, name, b, e, kind in part]


def _print_row(
    name: str,
    plan: ParallelPlan,
    engine: Engine,
    events: list[TraceEvent],
    traffic: list[dict[str, dict[str, int]]],
    step_s: float,
    layer_s: float,
) -> None:
    """Print the row of a plan: its measured step, the ratio to a step of layer parallelism, bubbles, and traffic.

    Args:
        name: Name of the plan.
        plan: The plan.
        engine: Its engine.
        events: Actions of all ranks in the measured steps.
        traffic: Traffic of each rank.
        step_s: Seconds of a step.
        layer_s: Seconds of a step of layer parallelism.
    """
    placement = Placement.of(plan)
    edges = [(s, s + 1) for s in range(plan.stages - 1)]
    dry_run = simulate(engine.schedule(), placement, edges, mirror=plan.mirror)
    kilobytes = {kind: sum(rank[kind]["bytes"] for rank in traffic) / 1e3 for kind in ("stage", "halo", "reduce")}
    times = f"{step_s:.2f} | {layer_s / step_s:.2f}"
    row = f"{times} | {bubble(events):.3f} | {dry_run.bubble:.3f} | {max(dry_run.peak_live)}"
    print(f"| {name} | {row} | " + " | ".join(f"{kilobytes[k]:.0f}" for k in kilobytes) + " |", flush=True)


def _write_timeline(out: Path | None, name: str, events: list[TraceEvent]) -> None:
    """Write a plan's events as a trace and as a picture into ``out``; None: write nothing."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        stem = name.replace(" ", "_").replace(",", "").replace("+", "and")
        (out / f"{stem}.json").write_text(to_json(events), encoding="utf-8")
        (out / f"{stem}.svg").write_text(draw(events, name), encoding="utf-8")


class SleepingInception(nn.Module):
    """Three modules of four branches with 3, 2, 2 and 1 small convolutions, each followed by a `Sleep`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 1)
        self.fans = nn.ModuleList(nn.ModuleList(map(self._branch, LENGTHS)) for _ in range(3))
        self.fc = nn.Linear(8, 2)

    @staticmethod
    def _branch(length: int) -> nn.Module:
        units = [(nn.Conv2d(8, 8, 3, padding=1), Sleep(BLOCK_S / SIZE_PX**2)) for _ in range(length)]
        return nn.Sequential(*(layer for unit in units for layer in unit))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, 2)``."""
        x = self.enter(x)
        for fan in self.fans:
            assert isinstance(fan, nn.ModuleList)
            a, b, c, d = (branch(x) for branch in fan)
            x = (a + b + c + d) / 4
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


LENGTHS, IMAGES = (3, 2, 2, 1), 2
BRANCHING = {
    "one rank": (ParallelPlan((ONE,)), "1"),
    "2 replicas, two ranks without images": (ParallelPlan((ONE,), replicas=2), "2"),
    "2 replicas of 2 planes": (ParallelPlan((ONE,), replicas=2, branches=2), "4"),
    "4 planes": (ParallelPlan((ONE,), branches=4), "8/3"),
}
"""Name -> (plan for two images, its speed-up over one rank if nothing but sleeping took time)."""


def _branching_rank(steps: int) -> None:
    """Time each plan of `BRANCHING`; all four ranks call this, and rank 0 prints a table."""
    comm = hyfi_core.init()
    torch.manual_seed(0)
    if comm.rank == 0:
        sleep_ms = f"{BLOCK_S * 1e3:.0f} ms"
        print(f"4 ranks, batch {IMAGES}; a convolution sleeps {sleep_ms} per image in forward, twice that in backward")
        print("| plan | step (s) | to one rank | at most | values between planes (KB) | reduce KB |")
        print("|---|---|---|---|---|---|")
    first_s = 0.0
    for name, (plan, ideal) in BRANCHING.items():
        # A plan of fewer ranks leaves the others idle, but `split` is collective: they call it, too.
        group = comm.split(0 if comm.rank < plan.ranks else None, comm.rank)
        if group is not None:
            seconds, engine = _timed(group, plan, SleepingInception(), steps, IMAGES)
            first_s = first_s or seconds
            traffic = group.gather_objects(engine.traffic())
            if traffic is not None:
                sums = [sum(rank[kind]["bytes"] for rank in traffic) / 1e3 for kind in ("stage", "reduce")]
                times = f"{seconds:.2f} | {first_s / seconds:.2f} | {ideal}"
                print(f"| {name} | {times} | {sums[0]:.0f} | {sums[1]:.0f} |", flush=True)
        comm.barrier()


REAL = {
    "one rank": ParallelPlan((ONE,), microbatches=4),
    "layer": ParallelPlan((ONE, ONE), ("layer1",), 4, "sequential"),
    "pipeline, 1f1b": ParallelPlan((ONE, ONE), ("layer1",), 4, "1f1b"),
    "pipeline, recomputed": ParallelPlan((ONE, ONE), ("layer1",), 4, "1f1b", recompute=True),
    "spatial, 1 x 2": ParallelPlan(((1, 2),), microbatches=4),
    "two directions, chimera": ParallelPlan((ONE, ONE), ("layer1",), 4, "chimera"),
    "2 replicas": ParallelPlan((ONE,), microbatches=2, replicas=2),
}


def _compare_resnet(size_px: int, steps: int) -> None:
    """Train ResNet-18 with each plan of `REAL`, in an mpiexec of its own, and print a table."""
    print(f"ResNet-18, {size_px}², batch 4, float32, channels-last; every rank has one thread")
    print("| plan | step (s) | largest rank (MB) | stage MB | halo MB | reduce MB |\n|---|---|---|---|---|---|")
    for name, plan in REAL.items():
        arguments = ["--plan", json.dumps(plan.to_json()), "--size", str(size_px), "--steps", str(steps)]
        command = [
            *find_mpiexec().command(plan.ranks),
            sys.executable,
            "-m",
            "workflows.benchmarks.dimensions",
            *arguments,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        cells = json.loads(completed.stdout.strip().splitlines()[-1])
        print(f"| {name} | " + " | ".join(str(item) for item in cells) + " |", flush=True)


def _resnet_rank(fields: dict[str, Any], size_px: int, steps: int) -> None:
    """Measure one plan on this rank; rank 0 prints its row of the table, as a JSON list of strings."""
    comm, plan = hyfi_core.init(), ParallelPlan.from_json(fields)
    torch.manual_seed(0)
    batch = 4 // plan.replicas
    model = convert_model(resnet18(2), "float32", "channels_last")
    engine = hyfi_core.parallelize(model, (batch, 3, size_px, size_px), plan, comm)
    images = torch.randn(batch, 3, size_px, size_px).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.long)

    def step() -> None:
        model.zero_grad()
        engine.accumulate(images, labels)

    seconds = _median(comm, step, steps)
    reports = comm.gather_objects([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, engine.traffic()])
    if reports is not None:
        sums = [sum(traffic[kind]["bytes"] for _, traffic in reports) / 1e6 for kind in ("stage", "halo", "reduce")]
        largest = max(peak_kb for peak_kb, _ in reports) / 1e3
        print(json.dumps([f"{seconds:.2f}", f"{largest:.0f}", *(f"{item:.1f}" for item in sums)]))


if __name__ == "__main__":
    main()
