"""Benchmark of layer memory: weights, gradients and moments on each rank of a pipeline, and its resident memory.

    python -m workflows.benchmarks.layers [--depth 18] [--filters 208] [--stages 4] [--size 64] [--ways kept released]

AmoebaNet-D ``(depth, filters)`` with AdamW, one rank (a process) for each stage, 1F1B, float32. ``kept``: every rank
keeps the whole model; ``released``: ``parallelize(release=True)``. For each way and rank, a JSON line in MB: weights
(with buffers), gradients and moments that are there after two steps; the same for the layers of its stage, counted in a
model without values; their ratio; growth of resident memory from before the model was built to after the steps, and its
peak.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.stages import cut_program
from hyfi_core.cost.operators import value_bytes
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes, return_freed_now
from workflows.launch.launch import RANK_SETTINGS
from workflows.launch.mpiexec import find_mpiexec

WAYS = ("kept", "released")
CLASSES, STEPS = 2, 2


def main() -> None:
    """Run each way in its own processes; or, as one of them, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=18)
    parser.add_argument("--filters", type=int, default=208)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        _rank(args)
        return
    for way in args.ways:
        command = [
            *find_mpiexec().command(args.stages),
            sys.executable,
            "-m",
            "workflows.benchmarks.layers",
            "--way",
            way,
        ]
        for name in ("depth", "filters", "stages", "size"):
            command += [f"--{name}", str(getattr(args, name))]
        subprocess.run(command, env=os.environ | RANK_SETTINGS | {"OMP_NUM_THREADS": "1"}, check=True)


def _rank(args: argparse.Namespace) -> None:
    """Train some steps as one rank; rank 0 prints a line for each rank: its tensors, and how much its process grew."""
    comm = hyfi_core.init()
    torch.manual_seed(0)
    shape = (args.stages, 3, args.size, args.size)
    plan = ParallelPlan(((1, 1),) * args.stages, "auto", args.stages, "1f1b")
    F.conv2d(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 3, 3))  # loads libraries, which must not count as growth
    before = resident_bytes()
    forget_peak()
    model = amoebanet_d(CLASSES, args.depth, args.filters)
    released = args.way == "released"
    engine = hyfi_core.parallelize(
        model, shape, plan, comm, optimizer=lambda p: torch.optim.AdamW(p), verify=False, release=released
    )
    images, labels = torch.randn(shape), torch.zeros(args.stages, dtype=torch.long)
    for _ in range(STEPS):
        engine.accumulate(images, labels)
        # Counted before the update, which frees them.
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        engine.update()
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    states = [t for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    tensor_bytes = {
        "weights": sum(t.nbytes for t in tensors),
        "gradients": gradients,
        "moments": sum(t.nbytes for t in states),
    }
    # Freed memory that the heap keeps must not count.
    return_freed_now()
    grown, peak = resident_bytes() - before, peak_bytes() - before
    stage_bytes, held_bytes = _stage_bytes(args, engine.plan, comm.rank), sum(tensor_bytes.values())
    sizes = tensor_bytes | {"held": held_bytes, "stage": stage_bytes, "growth": grown, "peak_growth": peak}
    facts = {"way": args.way, "rank": comm.rank, **{f"{name}_mb": round(size / 1e6, 1) for name, size in sizes.items()}}
    lines = comm.gather_objects(facts | {"held_to_stage": round(held_bytes / stage_bytes, 3)})
    for line in lines or ():
        print(json.dumps(line), flush=True)


def _stage_bytes(args: argparse.Namespace, plan: ParallelPlan, stage: int) -> int:
    """Return the bytes of a stage's weights and buffers, and of a gradient and two moments of its weights."""
    with torch.device("meta"):
        model = amoebanet_d(CLASSES, args.depth, args.filters)
    program = capture(model, (1, 3, args.size, args.size), torch.float32)
    assert plan.cuts != "auto"
    part = cut_program(program, program.outputs, plan.cuts)[stage].program
    weights, buffers = (sum(value_bytes(program, name) for name in names) for names in (part.parameters, part.buffers))
    # Weights, gradients, and the two moments of AdamW.
    return 4 * weights + buffers


if __name__ == "__main__":
    main()
