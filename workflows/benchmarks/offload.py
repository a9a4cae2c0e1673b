"""Benchmark of offloading: what loader and validator ranks gain, with real slides and ranks, and sleeps for compute.

    python -m workflows.benchmarks.offload [--size 1024] [--steps 45] [--share 0.2] [--rounds 2] [--latency-ms 5]

Runs of ``hyfi train`` with one trainer on the same slides in the same order; the network only sleeps:

    pure            images are in memory, and there is no validation: the lower bound of a step
    inline          the trainer loads and validates itself
    offload_all     a loader rank and a validator rank do that
    offload_far     the same, from a web server on loopback that waits ``--latency-ms`` before each answer
    compute-bound   inline and offload_all again, with images so small that loading and validation hardly take time

No slide is used twice in training, so that every one is opened, and its index read, for the first time. The sleeps are
chosen from the measured time of reading a batch, so that loading and validation are each half of
``--share`` of an inline step. Prints one JSON object. Times are medians over the groups of steps between two
validations, without the first three groups, during which the validators' children start; the shortest of ``--rounds``
rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from workflows.benchmarks.remote.__main__ import running_server

SETTING = "HYFI_BENCHMARK_OFFLOAD"
"""Environment variable with the sleeps, and the file for the times, for every rank and child (JSON)."""

EVERY_STEPS, BATCH, VAL_SLIDES = 5, 2, 2
DRAWN = 8
"""Slides that are written; others are the same under other names."""
WARM = 3 * EVERY_STEPS
SMALL_PX, COMPUTE_BOUND_S = 128, 0.25


def main() -> None:
    """Compare runs with and without ranks that load and validate; print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="height and width of an image in pixels")
    parser.add_argument("--steps", type=int, default=45, help=f"at least {WARM + 2 * EVERY_STEPS}")
    parser.add_argument("--share", type=float, default=0.2, help="fraction of loading and validation in an inline step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--latency-ms", type=float, default=5.0, help="of the store that is far away")
    args = parser.parse_args()
    if args.steps < WARM + 2 * EVERY_STEPS:
        parser.error(f"--steps {args.steps}: the first {WARM} warm up; {WARM + 2 * EVERY_STEPS} or more are needed")
    with (
        tempfile.TemporaryDirectory(prefix="hyfi-offload-") as folder,
        running_server(Path(folder), args.latency_ms) as address,
    ):
        result = compare(Path(folder), address, args.size, args.steps, args.share, args.rounds)
        print(json.dumps({**result, "latency_ms": args.latency_ms}, indent=2))


def compare(folder: Path, address: str, size_px: int, steps: int, share: float, rounds: int) -> dict[str, Any]:
    """Return the seconds of a step of each run, and their ratios; ``address``: of a web server of ``folder``."""
    store, small = make_store(folder, size_px, BATCH * steps), make_store(folder / "small", SMALL_PX, DRAWN)
    load_s = seconds_to_load(store, size_px)
    # Loading and validation take load_s each: together `share` of the step, computing the rest.
    compute_s = 2 * load_s * (1 - share) / share
    runs: dict[str, list[OffloadRun]] = {}
    for turn in range(rounds):  # runs alternate, so that other processes disturb all of them
        for name, design in (
            ("pure", "inline"),
            ("inline", "inline"),
            ("offload_all", "offload_all"),
            ("offload_far", "offload_all"),
        ):
            store_address = f"{address}/store" if name == "offload_far" else str(store)
            run = OffloadRun(folder / f"{name}-{turn}", store_address, size_px, steps, design, compute_s, load_s)
            runs.setdefault(name, []).append(run.go(pure=name == "pure"))
        for design in ("inline", "offload_all"):
            run = OffloadRun(
                folder / f"bound-{design}-{turn}", str(small), SMALL_PX, steps, design, COMPUTE_BOUND_S, 0.0
            )
            runs.setdefault(f"bound_{design}", []).append(run.go())
    step = {name: min(run.seconds for run in group) for name, group in runs.items()}
    return {
        "size_px": size_px,
        "batch": BATCH,
        "seconds_to_load_a_batch": round(load_s, 4),
        "step_seconds": {name: round(value, 4) for name, value in step.items()},
        "overhead_share_of_inline": round(1 - step["pure"] / step["inline"], 3),
        "removed_by_offload_all": round((step["inline"] - step["offload_all"]) / (step["inline"] - step["pure"]), 3),
        "offload_all_to_pure": round(step["offload_all"] / step["pure"], 4),
        "waiting_for_data": round(max(run.waiting() for run in runs["offload_all"]), 4),
        "offload_far_to_offload_all": round(step["offload_far"] / step["offload_all"], 4),
        "waiting_for_data_far": round(max(run.waiting() for run in runs["offload_far"]), 4),
        "compute_bound_offload_to_inline": round(step["bound_offload_all"] / step["bound_inline"], 4),
    }


class OffloadRun:
    """One run of ``hyfi train``.

    Args:
        folder: Folder of the run.
        store: The slides: a folder or an address.
        size_px: Height and width of an image.
        steps: Number of steps.
        design: Value of ``roles.design``.
        compute_s: Sleep of a training step.
        validate_s: Sleep of validation per step; the sum follows after every ``EVERY_STEPS`` steps.

    Attributes:
        seconds: Seconds from one step to the next.
    """

    seconds: float

    def __init__(
        self,
        folder: Path,
        store: str,
        size_px: int,
        steps: int,
        design: str,
        compute_s: float,  # sleep of a training step
        validate_s: float,  # sleep of validation for each training step
    ) -> None:
        self._folder, self._compute_s = folder, compute_s
        # A validation sleeps for all steps since the one before, shared by the slides that it predicts.
        self._predict_s = validate_s * EVERY_STEPS / VAL_SLIDES
        self._tree: dict[str, dict[str, Any]] = {
            "data": {"store": store, "size_px": size_px, "align_px": 32, "batch_size": BATCH, "min_coverage": 0},
            "model": {"name": "workflows.benchmarks.offload:sleeper"},
            "roles": {"design": design},
            "validation": {"every_steps": EVERY_STEPS},
            "run": {"dir": str(folder), "steps": steps, "tensorboard": False, "checkpoint_every_steps": EVERY_STEPS},
        }

    def go(self, pure: bool = False) -> OffloadRun:
        """Run ``hyfi train`` and set ``seconds``; ``pure``: with images in memory and without validation."""
        if pure:
            # More steps than the run has: no validation.
            self._tree["validation"]["every_steps"] = 10**9
        path = self._folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(self._tree))
        clock = self._folder.with_suffix(".clock")
        setting = {"compute_s": self._compute_s, "predict_s": self._predict_s, "pure": pure, "clock": str(clock)}
        subprocess.run(
            [sys.executable, "-m", "workflows.cli", "train", str(path)],
            env=os.environ | {SETTING: json.dumps(setting), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        starts = [float(line) for line in clock.read_text().split()]
        # From validation to validation, so that each group has the same work.
        groups = range(WARM, len(starts) - EVERY_STEPS, EVERY_STEPS)
        self.seconds = statistics.median((starts[k + EVERY_STEPS] - starts[k]) / EVERY_STEPS for k in groups)
        return self

    def waiting(self) -> float:
        """Return the fraction of its steps that the run waited for images, without the warm-up."""
        lines = [json.loads(line) for line in (self._folder / "metrics.jsonl").read_text().splitlines()]
        warm = [line for line in lines if line["kind"] == "train" and line["step"] > WARM]
        waited_s, whole_s = (sum(float(line[key]) for line in warm) for key in ("wait_seconds", "seconds"))
        return waited_s / whole_s


def make_store(folder: Path, size_px: int, slides: int) -> Path:
    """Write a store with training slides and two validation slides of noise, most of them links; return its path."""
    import numpy as np

    from data.store.layout import LevelSize, pyramid_levels
    from data.store.manifest import SlideRecord, merge_manifest
    from data.store.slide_store import slide_path
    from data.store.writer import SlideWriter

    store = folder / "store"
    store.mkdir(parents=True)
    for number in range(slides + VAL_SLIDES):
        name = f"slide-{number:02d}"
        if number < DRAWN:
            noise = np.random.default_rng(number).integers(150, 256, (3, size_px, size_px), dtype=np.uint8)
            with SlideWriter(store, name, pyramid_levels([LevelSize(size_px, size_px)], 1.0)) as writer:
                writer.write(0, 0, 0, noise)
                writer.write_tissue(np.ones((-(-size_px // 8), -(-size_px // 8)), bool), mpp_um=8.0)
                writer.publish({"mpp": 1.0, "kind": "resampled", "parameters": {"tissue": {"threshold": 0.05}}})
        else:
            # A link is opened like a slide of its own: its index is read for the first time.
            slide_path(store, name).symlink_to(slide_path(store, f"slide-{number % DRAWN:02d}"))
        SlideRecord(
            slide_id=name,
            source_path=f"{name}.tiff",
            status="done",
            source_mpp=0.5,
            store_mpp=1.0,
            height_px=size_px,
            width_px=size_px,
            tissue_fraction=1.0,
            bad_tiles=0,
            extra={"label": "ab"[number % 2], "case_id": name, "split": "train" if number < slides else "val"},
        ).save(store)
    merge_manifest(store)
    return store


def seconds_to_load(store: Path, size_px: int) -> float:
    """Return the seconds of reading and augmenting one batch in this process."""
    from data.samples.augment import Augment
    from data.samples.dataset import SlideDataset, SlideRef
    from hyfi_core.plan.box import Box

    slides = [SlideRef(f"slide-{number:02d}") for number in range(DRAWN)]
    dataset = SlideDataset(store, slides, size_px=size_px, mpp=1.0, align_px=32, augment=Augment())
    times = []
    for epoch in range(3):
        for index in range(DRAWN):
            start = time.perf_counter()
            dataset.read(index, Box.of_size(size_px, size_px), epoch)
            times.append(time.perf_counter() - start)
    # Without the first epoch, which opens the slides; runs open each slide, so their loading takes longer than this.
    return BATCH * statistics.median(times[DRAWN:])


def sleeper(classes: int, **_: Any) -> nn.Module:
    """Return a network of one layer, and make all engines of this process sleep instead of computing."""
    _sleep_instead(json.loads(os.environ[SETTING]))
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))


def _sleep_instead(setting: dict[str, Any]) -> None:
    """Patch `Engine` so that steps and predictions sleep for the seconds of ``setting`` instead of computing."""
    from data.loading.feed import InlineFeed
    from hyfi_core.plan.box import Box
    from hyfi_core.plan.input_part import InputPart
    from hyfi_core.runtime.batch_reader import read_part
    from hyfi_core.runtime.engine import Engine

    def accumulate(engine: Any, images: Any, labels: torch.Tensor) -> torch.Tensor:
        """Note the time, read the images and sleep, instead of computing a step; return a loss of 0."""
        with Path(setting["clock"]).open("a", encoding="utf-8") as clock:
            clock.write(f"{time.perf_counter()}\n")
        for part in engine.input_parts:
            read_part(images, part, 3, torch.float32)
        # Sleeping takes no core from loaders and validators: a trainer on a GPU takes none either.
        time.sleep(setting["compute_s"])
        return torch.zeros((), dtype=torch.float64)

    def predict(engine: Any, images: Any) -> torch.Tensor:
        read_part(images, InputPart(engine.input_box, 0, 1), 3, torch.float32)
        time.sleep(setting["predict_s"])
        return torch.zeros(1, 2)

    def read(feed: Any, box: Box, first: int, stop: int) -> torch.Tensor:
        shape = (stop - first, 3, *box.shape)
        return images_in_memory.setdefault(shape, torch.zeros(shape, dtype=torch.uint8))

    images_in_memory: dict[tuple[int, ...], torch.Tensor] = {}
    Engine.accumulate_unread, Engine.predict = accumulate, predict  # type: ignore[method-assign,assignment]
    if setting["pure"]:
        InlineFeed.read = read  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    main()
