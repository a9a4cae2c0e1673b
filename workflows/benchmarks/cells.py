"""Benchmark of cells: memory and time of one process to predict or train one image cell by cell, or in one piece.

    python -m workflows.benchmarks.cells [--size 4096] [--cells 4,4 8,8] [--model resnet18] [--threads N]
    python -m workflows.benchmarks.cells --train --spill FOLDER --memory 1.5e9 [--precision bfloat16] [--only-cells] …

With ``--train``, one step is measured, with batch norm in training mode. With ``--spill``, activations of cells are
moved to a file in the folder, so that the process needs at most ``--memory`` bytes, libraries included; also in
predictions.

Every way runs in its own process: plain PyTorch in one piece, then each grid of cells. Growth is the process's peak
resident memory (VmHWM) less its memory after a small image was predicted, with model, engine and kernels loaded. The
image is a repeated noise pattern. Cells read it box by box, and freed memory is returned to the system, as in the
commands; in one piece, the whole image is in memory. Prints a JSON line for each way, with ratios to the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes

if TYPE_CHECKING:
    import torch

    from hyfi_core.plan.box import Box
    from hyfi_core.plan.parallel_plan import ParallelPlan
    from hyfi_core.runtime.engine import Engine
    from workflows.option_values import Cells

_PATTERN_PX = 512
_WARM_PX = 256
_SPILLED = ("written", "read", "recomputed", "store")


def main() -> None:
    """Measure each way in its own process; or, as such a process, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--cells", nargs="+", default=["4,4"])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--train", action="store_true", help="measure a training step instead of a prediction")
    parser.add_argument("--spill", help="folder for spilled activations; default: keep all in memory")
    parser.add_argument("--memory", type=float, help="memory limit in bytes, with --spill")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only-cells", action="store_true", help="skip the run without cells, which may not fit")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(train(args) if args.train else measure(args)))
        return
    child_options = ["--train"] * args.train + ["--precision", args.precision]
    child_options += ["--spill", args.spill] if args.spill else []
    child_options += ["--memory", str(args.memory)] if args.memory else []
    first: dict[str, Any] | None = None
    for way in (*([] if args.only_cells else ["one piece"]), *args.cells):
        command = [sys.executable, "-m", "workflows.benchmarks.cells", "--way", way]
        command += ["--size", str(args.size), "--model", args.model]
        command += ["--threads", str(args.threads)] if args.threads else []
        command += child_options
        # A process for each way, because memory that one leaves in the heap would count for the next.
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode != 0:
            print(
                json.dumps({"way": way, "size_px": args.size, "failed": completed.stderr.splitlines()[-1:]}), flush=True
            )
            continue
        result = json.loads(completed.stdout.splitlines()[-1])
        first = first or result
        ratios = {
            f"{key}_to_first": round(result[key] / first[key], 3) for key in ("growth_mb", "seconds", "cpu_seconds")
        }
        off = max(abs(a - b) for a, b in zip(result["logits"], first["logits"], strict=True))
        print(json.dumps({**result, **ratios, "logits_off": off}), flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Predict one image in this process; return its memory in MB, seconds and logits.

    ``args.way`` is ``one piece``, or has the rows and columns of cells, as in ``4,4``.
    """
    import torch

    import hyfi_core
    from hyfi_core.comm.alone import AloneCommunicator
    from hyfi_core.models.by_name import build_model
    from hyfi_core.process_memory import return_what_is_freed
    from workflows.option_values import parse_cells

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    size_px, way = args.size, args.way
    model = build_model({"name": args.model, "classes": 2}).eval()
    shape, cells = (1, 3, size_px, size_px), None if way == "one piece" else parse_cells(way)
    began_s = time.perf_counter()
    if cells is not None:
        return_what_is_freed()  # as the commands do
        plan = _plan(args, cells)
        engine = hyfi_core.parallelize(model, shape, plan, AloneCommunicator())
        # A small image first: the growth below is that of the large one alone, without code that is loaded once.
        engine.predict(torch.zeros(1, 3, _WARM_PX, _WARM_PX))
    else:
        with torch.no_grad():
            model(torch.zeros(1, 3, _WARM_PX, _WARM_PX))
    prepared_s = time.perf_counter() - began_s
    pattern = torch.randn(1, 3, _PATTERN_PX, _PATTERN_PX)
    forget_peak()  # the capture has a peak of its own
    before, began_s, cpu_s = resident_bytes(), time.perf_counter(), time.process_time()
    if cells is not None:
        logits = engine.predict(lambda box: read(pattern, box))
    else:
        from hyfi_core.plan.box import Box

        with torch.no_grad():
            logits = model(read(pattern, Box.of_size(size_px, size_px)))
    seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
    result = {
        "way": way,
        "size_px": size_px,
        "growth_mb": round((peak_bytes() - before) / 1e6, 1),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "prepared_seconds": round(prepared_s, 2),
        "peak_mb": round(peak_bytes() / 1e6, 1),
        "logits": logits[0].tolist(),
    }
    return result if cells is None else {**result, **_spilled(engine)}


def _plan(args: argparse.Namespace, cells: Cells) -> ParallelPlan:
    """Return the plan of one rank with these cells, and with the spilling that the options ask for."""
    import hyfi_core

    memory_bytes = int(args.memory) if args.memory and args.spill else None
    return hyfi_core.ParallelPlan(((1, 1),), cells=cells, spill=args.spill, memory_bytes=memory_bytes)


def _spilled(engine: Engine) -> dict[str, int]:
    """Return the MB of the last call: ``written_mb``, ``read_mb``, …; empty if the plan does not spill."""
    counts = engine.spilled()
    return {} if counts is None else {f"{key}_mb": round(getattr(counts, f"{key}_bytes") / 1e6) for key in _SPILLED}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train one image for one step in this process; return memory in MB, seconds and loss.

    ``args.way`` is ``one piece``, or has the rows and columns of cells, as in ``4,4``.
    """
    import torch

    import hyfi_core
    from hyfi_core.comm.alone import AloneCommunicator
    from hyfi_core.models.by_name import build_model
    from hyfi_core.plan.box import Box
    from workflows.option_values import parse_cells

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = build_model({"name": args.model, "classes": 2}).train()
    cells = None if args.way == "one piece" else parse_cells(args.way)
    labels, images = torch.zeros(1, dtype=torch.long), PatternImages()
    autocast = torch.bfloat16 if args.precision == "bfloat16" else None
    engine = None
    if cells is not None:
        plan = _plan(args, cells)
        shape = (1, 3, args.size, args.size)
        engine = hyfi_core.parallelize(model, shape, plan, AloneCommunicator(), autocast=autocast)
    # In one piece, the whole image exists before clock and memory are read: neither time nor memory of it counts.
    image = None if engine is not None else images.read(Box.of_size(args.size, args.size), 0, 1)

    def step() -> float:
        """Return the loss of a training step, by cells or in one piece."""
        if engine is not None:
            return engine.accumulate(images, labels)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            loss = torch.nn.functional.cross_entropy(model(image).float(), labels)
        torch.autograd.backward(loss)
        return float(loss.detach())

    forget_peak()
    before, began_s, cpu_s = resident_bytes(), time.perf_counter(), time.process_time()
    loss = step()
    seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
    return {
        "way": args.way,
        "size_px": args.size,
        "growth_mb": round((peak_bytes() - before) / 1e6, 1),
        "peak_mb": round(peak_bytes() / 1e6, 1),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "logits": [loss],  # under the name by which `main` compares the ways
        **({} if engine is None else _spilled(engine)),
    }


class PatternImages:
    """A batch of one image that repeats a pattern of random bytes; the engine reads it box by box, like a slide."""

    def __init__(self) -> None:
        import torch

        self.pixel_dtype = torch.uint8
        self._pattern = torch.randint(0, 256, (1, 3, _PATTERN_PX, _PATTERN_PX), dtype=torch.uint8)

    def pixels(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return a box of the image, uint8."""
        return read(self._pattern, box)[first:stop]

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels as floats of about mean 0 and variance 1."""
        return pixels.float().sub_(127.5).div_(74.0)

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return a box of the image for the model."""
        return self.prepare(self.pixels(box, first, stop))


def read(pattern: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a box of the image that repeats ``pattern``, as a new tensor."""
    import torch

    rows, columns = (torch.arange(start, stop) % _PATTERN_PX for start, stop in ((box.y0, box.y1), (box.x0, box.x1)))
    # Indices are taken modulo the pattern's size: the whole image never exists.
    return pattern[:, :, rows][:, :, :, columns]


if __name__ == "__main__":
    main()
