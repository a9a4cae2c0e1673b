"""Benchmark of checkpoints: the time that saving costs a trainer, if files are written in the background or at once.

    python -m workflows.benchmarks.checkpoints [--model resnet50] [--size 512] [--every 4] [--saves 4]

One rank trains with AdamW (weights and two moments are saved), in turns without saving, with checkpoints that are
written while training continues, and with a wait for each checkpoint. Prints a JSON line: megabytes
(10^6) of a checkpoint, the median seconds of a step, of the copy and of the writing, the copy as a fraction of the time
between two checkpoints (``snapshot_share``), and the ratio of an interval's median time with each way to that without
saving.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.models import resnet
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.saving.checkpoint_writer import CheckpointPart, CheckpointWriter
from hyfi_core.runtime.saving.kept_checkpoints import step_folder

SavingWay = Literal["none", "beside", "at_once"]
"""No saving, writing beside the next steps, waiting until all is written."""


@dataclass
class Times:
    """Seconds of one way to save: of each interval between checkpoints, of each copy and of each writing."""

    intervals: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    writings: list[float] = field(default_factory=list)


def main() -> None:
    """Print, as a line of JSON, what saving costs in each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints")
    parser.add_argument("--saves", type=int, default=4, help="checkpoints with each way")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = _trainer(args.model, args.size)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(engine, Path(folder), args.size, args.every, args.saves)))


def measure(engine: Engine, folder: Path, size: int, every: int, saves: int) -> dict[str, float]:
    """Train ``saves`` intervals of ``every`` steps with each way to save, in turns; return the printed line.

    Without saving (``none``), while the checkpoint is written in the background (``beside``), or after a wait until it
    is written (``at_once``).
    """
    times: dict[SavingWay, Times] = {"none": Times(), "beside": Times(), "at_once": Times()}
    writer = CheckpointWriter(AloneCommunicator(), writes=True)
    _save(engine, writer, folder, 0, Times())  # not counted: the first copy allocates its memory
    writer.finish()
    for number in range(1, saves + 1):
        # Ways alternate, so that a slow phase of the disk affects all of them.
        for way, measured in times.items():
            begun_s = time.perf_counter()
            if way != "none":
                _save(engine, writer, folder, number, measured)
            if way == "at_once":
                before_s = time.perf_counter()
                writer.finish()
                measured.writings.append(time.perf_counter() - before_s)
            for _ in range(every):
                _step(engine, size)
                # As the training loop does after each step.
                if not writer.busy():
                    writer.advance()
            measured.intervals.append(time.perf_counter() - begun_s)
            writer.finish()  # not counted: the next interval has another way
    medians = {way: statistics.median(measured.intervals) for way, measured in times.items()}
    copy_s = statistics.median(times["beside"].copies)
    return {
        "checkpoint_mb": round(sum(file.stat().st_size for file in step_folder(folder, 1).iterdir()) / 1e6, 1),
        "step_s": round(medians["none"] / every, 4),
        "copy_s": round(copy_s, 4),
        "writing_s": round(statistics.median(times["at_once"].writings), 4),
        "snapshot_share": round(copy_s / medians["beside"], 4),
        "beside_to_none": round(medians["beside"] / medians["none"], 3),
        "at_once_to_none": round(medians["at_once"] / medians["none"], 3),
    }


def _save(engine: Engine, writer: CheckpointWriter, folder: Path, step: int, times: Times) -> None:
    begun_s = time.perf_counter()
    part = CheckpointPart(engine.owned_state(), engine.owned_optimizer())
    writer.begin(step_folder(folder, step), part, step=step, model={"step": step}, state={"step": step})
    times.copies.append(time.perf_counter() - begun_s)


def _trainer(name: str, size: int) -> Engine:
    """Return an engine after its first step, so that its optimizer has a state."""
    torch.manual_seed(0)
    model = getattr(resnet, name)(2).to(memory_format=torch.channels_last)
    engine = hyfi_core.parallelize(
        model,
        (1, 3, size, size),
        hyfi_core.ParallelPlan(grids=((1, 1),)),
        AloneCommunicator(),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        verify=False,
    )
    _step(engine, size)
    return engine


def _step(engine: Engine, size: int) -> None:
    images = torch.ones(1, 3, size, size).contiguous(memory_format=torch.channels_last)
    engine.train_step(images, torch.tensor([1]))


if __name__ == "__main__":
    main()
