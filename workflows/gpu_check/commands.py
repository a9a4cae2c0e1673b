"""Part of a check: the commands of a whole project on a few synthetic slides, as a user calls them."""

from __future__ import annotations

import csv
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from workflows.benchmarks.networks import largest
from workflows.gpu_check.measure_step import Row
from workflows.gpu_check.setting import Setting

SLIDES = 20
TOLERANCE = 0.02
"""Largest difference between probabilities of a GPU and of the CPU, which rounds differently."""


def commands(setting: Setting, _: str) -> Iterator[Row]:
    """Run synth, ingest, train alone and with other roles, validate and predict; stop at the first that fails."""
    folder = setting.out / "commands"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    device, side_px = setting.device.type, setting.sizes.slides_px
    config, slides, store = folder / "run.yaml", folder / "slides", folder / "store"
    config.write_text(yaml.safe_dump(_run(store, side_px, device)))
    best = folder / "one" / "checkpoints" / "best"
    roles = ["roles.loaders=1", "roles.validators=1"]
    if device == "cpu" or torch.cuda.device_count() > 1:  # each trainer needs a GPU of its own
        roles.append("plan.grids=[[1,2]]")
    words = {
        "synth": ["synth", slides, "--slides", SLIDES, "--size", side_px],
        "ingest": ["ingest", slides / "manifest.csv", "--out", store, "--mpp", 1.0],
        "train": ["train", config, f"run.dir={folder / 'one'}"],
        "train with a loader and a validator": ["train", config, f"run.dir={folder / 'roles'}", *roles],
        "validate": ["validate", best, "--store", store, "--split", "all"],
        "predict": ["predict", best, slides, "--out", folder / "predictions", "--device", device],
        "predict on the CPU": ["predict", best, slides, "--out", folder / "on-cpu", "--device", "cpu"],
    }
    for name, arguments in words.items():
        row = _timed(name, arguments)
        yield row
        if not row["passed"]:
            return
    yield _compared(folder / "predictions", folder / "on-cpu")


def _run(store: Path, side_px: int, device: str) -> dict[str, object]:
    """Return the configuration of a run of eight steps on slides of ``side_px`` × ``side_px``."""
    return {
        "data": {"store": str(store), "size_px": side_px // 2, "batch_size": 2},
        "model": {"name": "resnet10", "norm": "group"},
        "run": {"steps": 8, "dir": str(store.parent / "one"), "device": device, "tensorboard": False},
        "validation": {"every_steps": 4},
    }


def _timed(name: str, arguments: list[object]) -> Row:
    """Run a command of ``hyfi`` and return its row, with the last line of standard error if it fails."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "workflows.cli", *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(f"$ hyfi {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}\n")
    row: Row = {"what": f"hyfi {name}", "passed": done.returncode == 0, "seconds_s": time.monotonic() - begin_s}
    if done.returncode:
        row |= {"exit code": done.returncode, "said": (done.stderr.strip().splitlines() or [""])[-1][:300]}
    return row


def _compared(gpu: Path, cpu: Path) -> Row:
    """Compare the probabilities of all slides in two folders of predictions."""
    first, second = (_probabilities(folder / "predictions.csv") for folder in (gpu, cpu))
    # NaN if a probability is missing in either folder: then the row has not passed.
    difference = largest(abs(value - second.get(key, math.nan)) for key, value in first.items())
    passed = bool(first) and first.keys() == second.keys() and difference <= TOLERANCE
    slides = len({slide_id for slide_id, _ in first})
    return {"what": f"probabilities of {slides} slides", "passed": passed, "largest difference": difference}


def _probabilities(path: Path) -> dict[tuple[str, str], float]:
    """Return (slide, column) -> probability, NaN for a slide without a prediction."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in (rows[0] if rows else ()) if name.startswith("p_")]
    return {(row["slide_id"], name): float(row[name] or "nan") for row in rows for name in columns}
