"""Benchmark of cells: the host's work in a training step, with maps so small that little else takes time.

    python -m workflows.benchmarks.host_work [--model resnet18] [--size 128] [--cells 1,1 4,4] [--steps 5]
    python -m workflows.benchmarks.host_work --against CHECKOUT     # the same with the packages of another checkout

Each way runs in its own process, and prints a JSON line: kernels that it starts (on a GPU each costs its start, however
small its map), views and empty tensors, copies among the kernels, values that the host waits for, hand-overs between
threads, calls in Python and in C, and the median seconds and processor seconds of a step. All are of one whole step;
``…_each`` divides by the number of cells. ``modelled_launch_ms`` is the time that starting these kernels takes at
least, at 4 µs each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_LAUNCH_S = 4e-6
_VIEWS = ("slice", "detach", "select", "view", "unbind", "t.", "alias", "expand", "permute", "as_strided")
_NO_KERNEL = (*_VIEWS, "empty", "new_empty", "promote_types")
_COPIES = ("copy_", "clone", "_to_copy")
_WAITS = ("_local_scalar_dense", "item")


def main() -> None:
    """Measure each way in its own process; or, as such a process, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--cells", nargs="+", default=["1,1", "4,4"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(measured(args)))
        return
    here = Path(__file__).parents[3]
    for checkout in (here, *([args.against] if args.against else [])):
        for way in args.cells:
            command = [sys.executable, __file__, "--way", way, "--model", args.model]
            command += ["--size", str(args.size), "--steps", str(args.steps)]
            # This file with the packages of the other checkout.
            environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
            completed = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout)
            if completed.returncode:
                sys.exit(completed.stderr)
            of = "this checkout" if checkout == here else str(checkout)
            print(json.dumps({"of": of, **json.loads(completed.stdout.splitlines()[-1])}), flush=True)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return the host's work in a training step, in this process: counts of calls, and seconds.

    ``args.way`` has the rows and columns of cells, as in ``4,4``.
    """
    import torch

    import hyfi_core
    from hyfi_core.comm.alone import AloneCommunicator
    from hyfi_core.models.by_name import build_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, columns = (int(side) for side in args.way.split(","))
    cells = None if rows == columns == 1 else (rows, columns)
    model = build_model({"name": args.model, "classes": 2}).train()
    plan = hyfi_core.ParallelPlan(((1, 1),), cells=cells)
    engine = hyfi_core.parallelize(model, (1, 3, args.size, args.size), plan, AloneCommunicator())
    images, labels = torch.randn(1, 3, args.size, args.size), torch.zeros(1, dtype=torch.long)

    def step() -> None:
        engine.accumulate(images, labels)

    step()  # the first fills buffers
    seconds, cpu_seconds = [], []
    for _ in range(args.steps):
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - begin_s)
        cpu_seconds.append(time.process_time() - cpu_s)
    counts = {**operators(step), "hand_overs": hand_overs(step), **calls(step)}
    for_each_cell = {f"{name}_each": round(count / (rows * columns)) for name, count in counts.items()}
    times = {"seconds": round(median(seconds), 3), "cpu_seconds": round(median(cpu_seconds), 3)}
    launch = {"modelled_launch_ms": round(1e3 * _LAUNCH_S * counts["kernels"], 1)}
    return {"cells": args.way, "model": args.model, "size_px": args.size, **counts, **for_each_cell, **launch, **times}


def operators(step: Callable[[], None]) -> dict[str, int]:
    """Return how many operators of each kind a step calls, in all threads of cells."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from hyfi_core.runtime.runner import StageRunner

    counts: Counter[str] = Counter(kernels=0, views=0, copies=0, host_waits=0)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func).removeprefix("aten.")
            counts["views" if name.startswith(_NO_KERNEL) else "kernels"] += 1
            counts["copies"] += name.startswith(_COPIES)
            counts["host_waits"] += name.startswith(_WAITS)
            return func(*args, **(kwargs or {}))

    counting: Any = Counting
    train = StageRunner.train

    def in_mode(runner: StageRunner, *args: Any, **kwargs: Any) -> Any:
        # The main thread is in the mode already: entered twice, it would count calls twice.
        if threading.current_thread() is threading.main_thread():
            return train(runner, *args, **kwargs)
        with counting():  # a mode belongs to its thread
            return train(runner, *args, **kwargs)

    patched: Any = StageRunner
    patched.train = in_mode
    try:
        with counting():
            step()
    finally:
        patched.train = train
    return dict(counts)


def hand_overs(step: Callable[[], None]) -> int:
    """Return how often a thread waits on a condition during a step, until another thread wakes it."""
    count, wait = [0], threading.Condition.wait

    def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
        count[0] += 1
        return wait(condition, timeout)

    patched: Any = threading.Condition
    patched.wait = counted
    try:
        step()
    finally:
        patched.wait = wait
    return count[0]


def calls(step: Callable[[], None]) -> dict[str, int]:
    """Return the calls of functions in Python and in C that a step makes, in all threads."""
    events: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        events[event] += 1

    threading.setprofile(count)
    # `threading.setprofile` is for threads that start later, not for this one.
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {"python_calls": events["call"], "c_calls": events["c_call"]}


if __name__ == "__main__":
    main()
