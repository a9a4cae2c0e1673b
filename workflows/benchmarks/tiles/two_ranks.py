"""Two ranks of one thread that share the tiles of a slide against plain PyTorch with two threads, in turns.

    python -m workflows.benchmarks.tiles.two_ranks [--tiles 16] [--side 224] [--width 384] [--depth 12]
        [--rounds 3] [--steps 2]

Each way runs in processes of its own, with the memory settings that ``hyfi`` gives its ranks; a step is forward and
backward of one slide, the first one is not counted. Prints shortest and median seconds and seconds of the processor (of
both ranks together), and the ratios of the ranks to plain PyTorch. On cores that others use, too, two threads wait for
each other at every operator, and the ratio of seconds flatters the ranks. There, seconds of the processor of both ranks
in the ratio to those of plain PyTorch with one thread count: two threads cannot be more than twice as fast as one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import hyfi_core
from workflows.benchmarks.tiles.__main__ import CHUNK, AttentionHead, DrawnTiles, PatchEncoder, TilesRun, step_of
from workflows.launch.launch import RANK_SETTINGS
from workflows.launch.mpiexec import find_mpiexec

WAYS = {"plain": (1, 2), "one_thread": (1, 1), "two_ranks": (2, 1)}
"""Way -> (ranks, threads of each)."""


def ranks_step(run: TilesRun) -> Callable[[], object]:
    """Return the step of a rank that shares the tiles with the others."""
    torch.manual_seed(0)
    encoder, head = PatchEncoder(run.width, run.depth), AttentionHead(run.width)
    comm = hyfi_core.init()
    plan = hyfi_core.ParallelPlan(tiles=comm.size)
    engine = hyfi_core.parallelize_tiles(encoder, head, plan, comm, chunk=CHUNK, loss=nn.functional.cross_entropy)
    slide, label = DrawnTiles(run.tiles, run.side), torch.tensor([1])

    def step() -> None:
        encoder.zero_grad()
        head.zero_grad()
        engine.accumulate([slide], label)

    return step


def measure(run: TilesRun) -> None:
    """Print ``[seconds, seconds of the processor]`` of each step of this process."""
    step = ranks_step(run) if run.way == "two_ranks" else step_of(replace(run, way="plain"))
    step()
    for _ in range(run.rounds):
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        step()
        print(json.dumps([time.perf_counter() - start_s, time.process_time() - start_cpu_s]), flush=True)


def measured(run: TilesRun) -> list[tuple[float, float]]:
    """Return for each step (seconds of the slowest rank, processor seconds of all ranks in a mean step)."""
    ranks, threads = WAYS[run.way]
    words = [f"--{name}={getattr(run, name)}" for name in ("tiles", "side", "width", "depth")]
    command = [sys.executable, "-m", "workflows.benchmarks.tiles.two_ranks", "--way", run.way, *words]
    environment = os.environ | RANK_SETTINGS | {"OMP_NUM_THREADS": str(threads)}
    start = find_mpiexec().command(ranks) if ranks > 1 else []
    completed = subprocess.run(
        [*start, *command, f"--steps={run.rounds}"], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    # Every rank prints a pair for each step.
    pairs = [json.loads(numbers) for numbers in re.findall(r"\[.*?\]", completed.stdout)]
    total_cpu_s = sum(cpu_s for _, cpu_s in pairs) / run.rounds
    # Ranks end a step together: sorted, each `ranks` neighbours belong to one step, the last of them the slowest rank.
    longest = sorted(seconds for seconds, _ in pairs)[ranks - 1 :: ranks]
    return [(seconds, total_cpu_s) for seconds in longest]


def main() -> None:
    """Print a line of JSON for each way, and one of ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tiles", 16), ("side", 224), ("width", 384), ("depth", 12), ("rounds", 3), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs = {way: TilesRun(way, args.tiles, args.width, args.depth, args.side, args.steps) for way in WAYS}
    if args.way:  # a process that `measured` has started
        measure(runs[args.way])
        return
    steps: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        # Ways alternate, so that a slow phase of the machine affects all of them.
        for way, run in runs.items():
            steps[way] += measured(run)
    summary = {
        way: {
            "shortest_s": min(seconds for seconds, _ in times),
            "median_s": statistics.median(seconds for seconds, _ in times),
            "cpu_s": statistics.median(cpu_s for _, cpu_s in times),
        }
        for way, times in steps.items()
    }
    for way, values in summary.items():
        print(json.dumps({"way": way} | {name: round(value, 2) for name, value in values.items()}))
    for way in ("plain", "one_thread"):
        ratios = {name: round(value / summary[way][name], 3) for name, value in summary["two_ranks"].items()}
        print(json.dumps({"two_ranks_to": way} | ratios))


if __name__ == "__main__":
    main()
