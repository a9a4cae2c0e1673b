"""Benchmark of fused halos against an exchange before each window operator, with slow messages, in turns.

    python -m workflows.benchmarks.fused [--model amoebanet] [--size 128] [--delay-ms 0.5] [--fused-halo 2] [--rounds 5]

Two ranks (threads) on a 1 x 2 grid, with one compute thread each. Every halo exchange and every all-reduce takes
``--delay-ms``, as between hosts. Prints a JSON line: seconds of a training step (median), halo messages of one rank,
and the ratio of fused to plain.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.delayed import DelayedCommunicator, Latency
from hyfi_core.comm.threads import run_ranks
from hyfi_core.models import amoebanet, resnet


def main() -> None:
    """Print, as a line of JSON, the times and halo messages of both ways, and the ratio of the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["amoebanet", "resnet18", "resnet50"], default="amoebanet")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--delay-ms", type=float, default=0.5)
    parser.add_argument("--fused-halo", default="2", help='a number, or "auto"')
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    fused = args.fused_halo if args.fused_halo == "auto" else int(args.fused_halo)
    torch.set_num_threads(1)
    print(json.dumps(compare(args.model, args.size, args.delay_ms / 1e3, fused, args.rounds)), flush=True)


def compare(name: str, size: int, delay_s: float, fused_halo: int | str, rounds: int) -> dict[str, object]:
    """Return the median seconds and the halo messages of a training step on two ranks with slow messages.

    In turns: with an exchange before each window operator (``plain``), and with exchanges for several (``fused``).

    Args:
        name: Name of the network.
        size: Height and width of the image.
        delay_s: Seconds that each message takes.
        fused_halo: Largest number of operators that share an exchange; ``auto``: by cost.
        rounds: Number of measured steps.
    """
    torch.manual_seed(0)
    model = amoebanet.amoebanet_d(2, 3, 64) if name == "amoebanet" else getattr(resnet, name)(2, width=16)
    halos = {"plain": 1, "fused": fused_halo}
    # Ranks are threads of one process: each needs a model of its own, on both sides.
    models_of = {side: [copy.deepcopy(model) for _ in range(2)] for side in halos}

    def body(comm: Any) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Return the seconds of each step, and the halo messages of a step, of each side on this rank."""
        slow = DelayedCommunicator(comm, Latency(delay_s), reductions=True)
        sides = {side: _step(models_of[side][comm.rank], size, halo, slow) for side, halo in halos.items()}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(rounds + 1):
            for side, (step, _) in sides.items():
                comm.barrier()
                begun = time.perf_counter()
                step()
                if turn:  # the first one warms up
                    seconds[side].append(time.perf_counter() - begun)
        return seconds, {side: engine.traffic()["halo"]["messages"] for side, (_, engine) in sides.items()}

    seconds, messages = run_ranks(2, body)[0]
    plain, fused = (statistics.median(seconds[side]) for side in ("plain", "fused"))
    return {
        "model": name,
        "size_px": size,
        "delay_ms": delay_s * 1e3,
        "fused_halo": fused_halo,
        "plain_messages": messages["plain"],
        "fused_messages": messages["fused"],
        "plain_s": round(plain, 4),
        "fused_s": round(fused, 4),
        "fused_to_plain": round(fused / plain, 3),
    }


def _step(model: nn.Module, size: int, fused_halo: Any, comm: Any) -> tuple[Any, hyfi_core.Engine]:
    """Return a rank's step, and the engine that runs it."""
    shape = (1, 3, size, size)
    plan = hyfi_core.ParallelPlan(grids=((1, 2),), fused_halo=fused_halo)
    engine = hyfi_core.parallelize(model, shape, plan, comm)
    images, labels = torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch.tensor([1])
    return lambda: engine.accumulate(images, labels), engine


if __name__ == "__main__":
    main()
