"""Benchmark of spatial parallelism: two ranks with one thread against plain PyTorch with two threads, in turns.

    python -m workflows.benchmarks.spatial [--size 1024 2048] [--model resnet18] [--keep-memory]

Prints a JSON line for each size: seconds of a training step (the shortest, which other processes disturb least) and
ratios of shortest and of median steps. Batch 1, float32, channels-last, batch norm in training mode, without optimizer
step. All variants ("sides") have the memory settings that ``hyfi`` gives its ranks, except ``as_started``, which is
plain PyTorch without them. ``as_written`` and ``as_written_two_ranks`` start with contiguous images and weights,
PyTorch's default; ``four_ranks`` are a grid of 2 × 2; ``compiled`` is one rank with compiled segments,
``plain_compiled`` plain PyTorch as ``torch.compile`` makes it. ``--memory`` prints, instead of times, by how many MB a
process grows in its first and in its third step (peak less before, the largest of all ranks, with freed memory returned
to the system), and the ratios to plain. A small size shows the cost of the engine: ``--size 64 --model resnet50 --steps
30 --sides plain one_rank``. With ``--keep-memory``, all sides except ``as_started`` keep freed memory: faster, but
larger.
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
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.lowering.compiling.segment_compiler import CompileMode
from hyfi_core.models import resnet
from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes, return_what_is_freed
from workflows.launch.launch import RANK_SETTINGS, own_rank
from workflows.launch.mpiexec import find_mpiexec

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
SIDES = (
    "plain",
    "as_started",
    "two_ranks",
    "one_rank",
    "as_written",
    "as_written_two_ranks",
    "four_ranks",
    "compiled",
    "plain_compiled",
)
GRIDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}


def main() -> None:
    """Run the whole comparison; or, as a child process, one side of one round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=SIDES[:6], help="which to compare, plain among them"
    )
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    args = parser.parse_args()
    if args.side and args.memory:
        _report_memory(args.side, args.model, args.size[0])
        return
    if args.side:
        _report(_side(args.side, args.model, args.size[0]), args.steps)
        return
    for size in args.size:
        if args.memory:
            print(json.dumps(_memory(args.model, size, args.sides)), flush=True)
            continue
        settings = RANK_SETTINGS | (KEEP_MEMORY if args.keep_memory else {})
        print(json.dumps(compare(args.model, size, args.rounds, args.steps, settings, args.sides)), flush=True)


def compare(
    model: str, size: int, rounds: int, steps: int, settings: dict[str, str], sides: Sequence[str] = SIDES
) -> dict[str, object]:
    """Return the shortest seconds of a step of each side, and ratios to plain PyTorch.

    Sides alternate, so that other processes disturb all of them alike.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, times in seconds.items():
            times += _run(side, model, size, steps, settings)
    result: dict[str, object] = {"model": model, "size_px": size}
    result |= {f"{side}_s": round(min(times), 3) for side, times in seconds.items()}
    compared = [side for side in sides if side not in ("plain", "as_started")]
    pairs = [(side, "plain") for side in compared] + [("two_ranks", "as_started")]
    for ours, theirs in (pair for pair in pairs if {*pair} <= {*sides}):
        for name, summary in (("", min), ("_median", statistics.median)):
            result[f"{ours}_to_{theirs}{name}"] = round(summary(seconds[ours]) / summary(seconds[theirs]), 3)
    return result


def _memory(model: str, size: int, sides: Sequence[str]) -> dict[str, object]:
    """Return the growth of each side in the first and in a later step, in MB, and ratios to plain."""
    grown = {side: _run(side, model, size, 1, RANK_SETTINGS, ["--memory"]) for side in sides}
    ratios = {
        f"{side}_to_plain": [round(a / b, 3) for a, b in zip(mb, grown["plain"], strict=True)]
        for side, mb in grown.items()
    }
    return {"model": model, "size_px": size, **{f"{side}_mb": mb for side, mb in grown.items()}, **ratios}


def _run(
    side: str, model: str, size: int, steps: int, settings: dict[str, str], more: Sequence[str] = ()
) -> list[float]:
    """Run one side (a variant in ``SIDES``) in new processes; return its seconds of each step, or its growth in MB."""
    ranks = 4 if side == "four_ranks" else 2 if side.endswith("two_ranks") else 1
    command = [sys.executable, "-m", "workflows.benchmarks.spatial", "--side", side, "--model", model]
    command += ["--size", str(size), "--steps", str(steps), *more]
    # Memory settings of this process must not reach `as_started`.
    environment = {name: value for name, value in os.environ.items() if name not in RANK_SETTINGS | KEEP_MEMORY}
    # Two threads in all, as many as plain PyTorch has.
    environment |= {"OMP_NUM_THREADS": str(max(1, 2 // ranks))} | ({} if side == "as_started" else settings)
    start = find_mpiexec().command(ranks) if ranks > 1 else []
    completed = subprocess.run([*start, *command], env=environment, capture_output=True, text=True, check=True)
    lists = [json.loads(numbers) for numbers in re.findall(r"\[.*?\]", completed.stdout)]
    # One rank prints times, but all print memory: of each number, the largest of all ranks.
    return [max(of_ranks) for of_ranks in zip(*lists, strict=True)]


def _side(side: str, name: str, size: int) -> Callable[[], None]:
    """Return the function that runs one training step of a side."""
    torch.manual_seed(0)
    order = torch.contiguous_format if side.startswith("as_written") else torch.channels_last
    model = getattr(resnet, name)(2).to(memory_format=order)
    images = torch.randn(1, 3, size, size).contiguous(memory_format=order)
    labels = torch.tensor([1])
    if side in ("plain", "as_started", "plain_compiled"):
        forward = torch.compile(model) if side == "plain_compiled" else model

        def plain() -> None:
            model.zero_grad()
            F.cross_entropy(forward(images), labels).backward()

        return plain
    comm = hyfi_core.init()
    plan = hyfi_core.ParallelPlan(grids=(GRIDS[comm.size],))
    mode: CompileMode = "on" if side == "compiled" else "off"
    engine = hyfi_core.parallelize(model, (1, 3, size, size), plan, comm, compile=mode)

    def ours() -> None:
        model.zero_grad()
        engine.accumulate(images, labels)

    return ours


def _report(step: Callable[[], None], steps: int) -> None:
    """Print the seconds of each step on rank 0."""
    step()  # captures the model and fills caches
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    if own_rank() == 0:
        print(json.dumps(times), flush=True)


def _report_memory(side: str, model: str, size: int) -> None:
    """Print the MB by which this process grows in its first and third step."""
    # Otherwise memory that a step freed stays in the process, and the next step seems to need none.
    return_what_is_freed()
    step, grown = _side(side, model, size), []
    for _ in range(3):
        forget_peak()
        before = resident_bytes()
        step()
        grown.append(peak_bytes() - before)
    print(json.dumps([round(grown[0] / 1e6), round(grown[-1] / 1e6)]), flush=True)


if __name__ == "__main__":
    main()
