"""Every benchmark still runs: small, so what it prints means nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from torch import nn

from tests.conftest import ROOT
from workflows.benchmarks import networks
from workflows.benchmarks.predictions import __main__ as predictions

SMALL = {
    "cells": ["--size", "256", "--cells", "2"],
    "checkpoints": ["--model", "resnet18", "--size", "64", "--every", "1", "--saves", "1"],
    "components": ["--size", "256", "--rounds", "1"],
    "decode": ["--size", "1024", "--region", "512", "--rounds", "1"],
    "demo_task": ["--help"],  # trains for a quarter of an hour, however little is asked
    "dimensions": ["--steps", "1"],
    "features": ["SLIDE", "--width", "64", "--depth", "1", "--side", "64", "--rounds", "1"],
    "forecast": ["--size", "64", "--steps", "1", "--models", "resnet18", "--ranks", "1", "--machine", "cpu"],
    "fused": ["--size", "64", "--rounds", "1"],
    "headlines": ["--only", "Chimera"],
    "heartbeats": ["--rounds", "1"],
    "host_work": ["--size", "32", "--cells", "2,1", "--steps", "1", "--model", "resnet6"],
    "ingest_memory": ["--size", "1024", "--mpp", "0.5"],
    "layers": ["--depth", "3", "--filters", "16", "--stages", "2", "--size", "64"],
    "learnt_tasks": ["--train", "16", "--val", "8", "--test", "8", "--epochs", "1", "--only", "corn"],
    "loader": ["SLIDE", "--px", "256", "--images", "2", "--rounds", "1"],
    "networks": None,  # needs packages of third parties
    "offload": ["--size", "256", "--steps", "25", "--rounds", "1"],
    "overlap": ["--size", "128", "--steps", "1"],
    "overview": None,  # draws from a finished demo: the demo's own test does
    "predictions": ["--size", "1024", "--ways", "1:1,1", "2:2,1"],
    "reduction": ["--rounds", "1"],
    "remote": ["--slides", "2", "--size", "512", "--image", "256", "--rounds", "1"],
    "scale": ["--model", "resnet18", "--size", "512", "--most", "64"],
    "shares": ["--steps", "2"],
    "slide_checks": ["SLIDE"],
    "snapshot": ["--size", "64", "--every", "1", "--validations", "2"],
    "spatial": ["--size", "128", "--rounds", "1", "--steps", "1"],
    "store": ["SLIDE", "--runs", "1"],
    "tiles": ["--tiles", "4", "--width", "64", "--depth", "1", "--side", "32", "--counts", "16", "--room-mb", "400"],
    "tissue": ["--mpp", "1", "2", "--drawn", "1024", "--slides", "1"],
    "trees": ["CHECKOUT", "--only", "host", "loader", "--pairs", "1", "--rounds", "1"],
    "view": ["SLIDE", "--tiles", "24", "--gigapixel", "3000"],
}
PARTS = {"__init__", "one_core"}


def test_all_benchmarks_are_known_here() -> None:
    folder = ROOT / "workflows" / "benchmarks"
    found = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__main__.py")}
    assert found - PARTS == SMALL.keys()


def test_a_network_is_captured_and_held_against_one_process() -> None:
    def make(side_px: int) -> nn.Module:
        layers = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(4, networks.CLASSES))

    assert networks.full_size(make) == "captured"
    assert networks.small_size(make).startswith("exact")


def test_peaks_are_those_of_ranks_alone_and_in_their_order() -> None:
    peaks = {predictions._STARTED: 90_000_000, **{str(rank): rank * 1_000_000 for rank in range(12)}}
    assert predictions._of_ranks(peaks) == list(range(12))
    assert predictions._of_ranks({predictions._STARTED: 90_000_000}) == [90]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, words in SMALL.items() if words is not None])
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    words = [str(ROOT) if word == "CHECKOUT" else word for word in SMALL[name] or []]
    if "SLIDE" in words:
        picture = np.random.default_rng(0).integers(0, 256, (1500, 1700, 3), dtype=np.uint8)
        words[words.index("SLIDE")] = str(tmp_path / "slide.tiff")
        how = {"compression": "jpeg", "resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
        tifffile.imwrite(tmp_path / "slide.tiff", picture, tile=(256, 256), photometric="rgb", **how)
    done = subprocess.run(
        [sys.executable, "-m", f"workflows.benchmarks.{name}", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
