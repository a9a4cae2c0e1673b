"""Forecasts of the memory of runs of tiles: ``hyfi simulate`` against the peak of the process of ``hyfi train``.

    python -m workflows.benchmarks.tiles.forecasts STORE [--limits none,800,1300] [--width 128] [--depth 3] [--side 224]

STORE: of ``hyfi ingest``, with labels in its manifest. Two slides of a step, no augmentation; limits are MB of
``plan.memory_bytes``. Prints a line for each: chunk, share of the tiles that are kept, both amounts and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

_HYFI = [sys.executable, "-m", "workflows"]


def forecast(config: Path, words: list[str]) -> dict[str, Any]:
    """Return the forecast of a run as JSON."""
    command = [*_HYFI, "simulate", str(config), "--machine", "cpu", "--json", *words]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    values: dict[str, Any] = json.loads(output.splitlines()[-1])
    return values


def peak(config: Path, words: list[str]) -> int:
    """Return the peak of resident memory, in bytes, of a process that runs ``hyfi train``.

    Raises:
        RuntimeError: Training failed.
    """
    process = subprocess.Popen([*_HYFI, "train", str(config), *words], stdout=subprocess.DEVNULL)
    # wait4 returns the peak of this child; getrusage would return that of the largest child so far.
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"hyfi train ended with status {status}; it said why above")
    # Linux gives KiB.
    return usage.ru_maxrss * 1024


def main() -> None:
    """Print, for each limit of memory, the forecast, the measured peak and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--limits", default="none,800,1300")
    for name, default in (("width", 128), ("depth", 3), ("side", 224)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    encoder = {"name": "workflows.benchmarks.tiles.__main__:PatchEncoder"}
    tree = {
        "data": {"store": str(args.store), "batch_size": 2, "augment": False, "tiles": {"size_px": args.side}},
        "model": {"encoder": encoder | {"options": {"width": args.width, "depth": args.depth}}},
        "validation": {"every_steps": 50},
        "run": {"steps": 1, "tensorboard": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tiles.yaml"
        config.write_text(yaml.safe_dump(tree))
        for number, limit in enumerate(args.limits.split(",")):
            limits = [] if limit == "none" else [f"plan.memory_bytes={int(limit) * 1_000_000}"]
            words = [*limits, f"run.dir={folder}/run-{number}"]
            expected, measured = forecast(config, words), peak(config, words)
            print(
                f"limit {limit:>6} MB: chunks of {expected['chunk']}, {expected['kept']:4.0%} kept, forecast "
                f"{expected['memory_bytes'] / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB, ratio "
                f"{expected['memory_bytes'] / measured:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
