"""Benchmark of preparing a model: capture at full size, fused-halo planning and lowering for one rank of a grid.

    python -m workflows.benchmarks.capture [--model resnet50] [--size 16384] [--grid 2 2] [--fused-halo auto]

Prints a JSON line: seconds of each part, CPU seconds of all parts, and the growth of this process's peak memory over
that of PyTorch, the model and one export of a single layer. No image is allocated.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.cost.fused_depth import fused_runs
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.lowering.segments import build_tape
from hyfi_core.models import amoebanet, resnet
from hyfi_core.process_memory import peak_bytes


def main() -> None:
    """Print the measurements of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="resnet50", help="a function of hyfi_core.models.resnet, or resnet1001, or amoebanet"
    )
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--grid", type=int, nargs=2, default=[2, 2])
    parser.add_argument("--fused-halo", default="auto", help='a number, or "auto"')
    given = parser.parse_args()
    fused = given.fused_halo if given.fused_halo == "auto" else int(given.fused_halo)
    print(json.dumps(measure(given.model, given.size, (given.grid[0], given.grid[1]), fused)), flush=True)


def measure(name: str, size: int, grid: tuple[int, int], fused_halo: int | str) -> dict[str, object]:
    """Return time and memory of preparing the model ``name`` for images of ``size`` x ``size`` pixels."""
    model = _model(name)
    capture(nn.Conv2d(3, 3, 1), (1, 3, 8, 8), torch.float32)  # the first export imports much of PyTorch
    before = peak_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    program = capture(model, (1, 3, size, size), torch.float32)
    captured = time.perf_counter()
    target = Target(grid, 0)
    ranked = lower(program, target, runs=fused_runs(program, target, fused_halo=fused_halo))
    tape = build_tape(ranked, program.parameters)
    done = time.perf_counter()
    return {
        "model": name,
        "size_px": size,
        "grid": list(grid),
        "fused_halo": fused_halo,
        "operators": len(program.operators),
        "steps": len(tape.steps),
        "capture_s": round(captured - started, 2),
        "plan_s": round(done - captured, 2),
        "total_s": round(done - started, 2),
        "total_processor_s": round(time.process_time() - cpu_started, 2),
        "peak_growth_mib": round((peak_bytes() - before) / 2**20, 1),
    }


def _model(name: str) -> nn.Module:
    if name == "amoebanet":
        return amoebanet.amoebanet_d(2)
    if name == "resnet1001":
        return resnet.resnet_v2(1001, classes=2)
    model: nn.Module = getattr(resnet, name)(2)
    return model


if __name__ == "__main__":
    main()
