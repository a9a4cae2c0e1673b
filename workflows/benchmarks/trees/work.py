"""The work that two checkouts take steps of, in a process that reads ``step`` and ``end`` from its standard input.

Runs as a script with the packages of either checkout, so that it uses only what both have: the public names of the
core, thread-ranks, and the store.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_STEPS = 2
"""Steps before the first that is timed: the first allocates, and lowers the program."""


def main() -> None:
    """Do one kind of work with the packages of one checkout, then print by how many bytes the process grew."""
    checkout, kind, size_px, store = sys.argv[1:]
    import torch

    import hyfi_core
    from hyfi_core.process_memory import peak_bytes, resident_bytes

    # Otherwise, an installed package could stand for both checkouts.
    assert hyfi_core.__file__.startswith(f"{checkout}/"), f"{hyfi_core.__file__} is not of {checkout}"
    # Both checkouts on the same core, so that other processes of the machine slow both.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Read after the imports: their memory does not count.
    before_bytes = resident_bytes()
    WORK[kind](int(size_px), Path(store))
    print(peak_bytes() - before_bytes, flush=True)


def serve(step: Callable[[], object]) -> None:
    """Take a step for each line ``step``, and print its processor seconds; return after ``end``."""
    for _ in range(WARM_STEPS):
        step()
    print("ready", flush=True)
    while sys.stdin.readline().strip() == "step":
        begin_s = time.process_time()
        step()
        print(time.process_time() - begin_s, flush=True)


def _engine(size_px: int, store: Path) -> None:
    """One rank, resnet18, one image."""
    _training("resnet18", size_px, 1, {"grids": ((1, 1),)})


def _host(size_px: int, store: Path) -> None:
    """One rank, resnet50, maps so small that the engine's own work shows."""
    _training("resnet50", size_px // 4, 1, {"grids": ((1, 1),)})


def _two_ranks(size_px: int, store: Path) -> None:
    """The image divided among two ranks."""
    _training("resnet18", size_px, 1, {"grids": ((1, 2),)})


def _pipeline(size_px: int, store: Path) -> None:
    """Two stages and four micro-batches, 1F1B."""
    options: dict[str, Any] = {"cuts": ("layer2",), "microbatches": 4, "schedule": "1f1b"}
    _training("resnet18", size_px // 2, 4, {"grids": ((1, 1), (1, 1)), **options})


def _cells(size_px: int, store: Path) -> None:
    """One rank, 2 × 2 cells."""
    _training("resnet18", size_px, 1, {"grids": ((1, 1),), "cells": (2, 2)})


def _training(model_name: str, size_px: int, batch: int, options: dict[str, Any]) -> None:
    """Take training steps on thread-ranks, which wait for each other before and after each."""
    import torch

    import hyfi_core
    from hyfi_core.comm.threads import run_ranks
    from hyfi_core.models.by_name import build_model

    plan = hyfi_core.ParallelPlan(**options)
    shape = (batch, 3, size_px, size_px)
    images, labels = torch.randn(shape), torch.zeros(batch, dtype=torch.long)
    ended = threading.Event()  # set by rank 0 before the first barrier, read by all ranks between the two
    start_barrier, end_barrier = threading.Barrier(plan.ranks), threading.Barrier(plan.ranks)

    def body(comm: Any) -> None:
        """Take a step whenever rank 0 reads ``step`` from its input, until it reads anything else."""
        torch.manual_seed(0)
        model = build_model({"name": model_name, "classes": 2}).train()
        sgd = functools.partial(torch.optim.SGD, lr=1e-4)
        engine = hyfi_core.parallelize(model, shape, plan, comm, optimizer=sgd)

        def step() -> bool:
            """Train a step, or nothing after the end; return whether a step was trained."""
            # With both barriers, the time of rank 0's step includes the work of all ranks.
            start_barrier.wait()
            trains = not ended.is_set()
            if trains:
                engine.train_step(images, labels)
            end_barrier.wait()
            return trains

        if comm.rank == 0:
            serve(step)
            ended.set()
            step()  # trains nothing, but the other ranks pass the barriers and see that no step follows
            return
        while step():
            pass

    run_ranks(plan.ranks, body, timeout_s=3600.0)


def _loader(size_px: int, store: Path) -> None:
    """Read the same square of a slide four times, turned and recoloured by four draws, as a loader's worker does."""
    from data.samples.augment import Augment
    from data.store.slide_store import SlideStore
    from hyfi_core.plan.box import Box

    (path,) = (each for each in store.rglob("*.zarr"))
    slide, augment = SlideStore.open(path), Augment()
    side = min(4 * size_px, slide.levels[0].height_px, slide.levels[0].width_px)

    def step() -> None:
        for number in range(4):
            variation = augment.draw(seed=0, epoch=number, slide_id="square", size_px=(side, side))
            variation.apply(slide.read(variation.source(Box(0, side, 0, side))))

    serve(step)


WORK: dict[str, Callable[[int, Path], None]] = {
    "engine": _engine,
    "host": _host,
    "two_ranks": _two_ranks,
    "pipeline": _pipeline,
    "cells": _cells,
    "loader": _loader,
}

if __name__ == "__main__":
    main()
