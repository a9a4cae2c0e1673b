"""Benchmark of predictions of one huge image: memory of every rank, time, and equality with one process.

    python -m workflows.benchmarks.predictions [--size 4096] [--ways 1:1,1 2:2,1] [--model resnet18] [--width 8]
                                               [--trained PX] [--folder DIR]

A way is RANKS:ROWS,COLUMNS of cells of each rank, RANKS:auto without ``--cells``. A drawn slide of 0.5 µm is stored
once. Every way is a run of ``hyfi predict --tissue off``, so that the image is the whole slide. The network has random
weights. Peaks are resident memory (VmHWM) of each rank, libraries included. Prints a JSON line for each way, with the
largest differences of logits and heatmaps (relative to their largest value) to the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

_MARK, _STARTED = "HYFI_BENCHMARK_RUN", "started"
"""Environment variable that marks a run's processes; key of the peak of the process that was started."""


def main() -> None:
    """Draw and store the slide, save the network, and predict in every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--ways", nargs="+", default=["1:1,1", "2:2,1"], metavar="RANKS:R,C")
    parser.add_argument("--trained", type=int, help="size of the training's images; default: the slide's")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument(
        "--folder", type=Path, help="folder for slide, store and results, kept; default: a temporary one"
    )
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        _measure(args, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        _measure(args, Path(folder))


def _measure(args: argparse.Namespace, folder: Path) -> None:
    """Predict a slide in each way, and print seconds, memory and differences from the first way."""
    stored = store_slide(folder, args.size)
    checkpoint = save_network(folder / "checkpoint", args.model, args.width, args.trained or args.size)
    first = None
    for way in args.ways:
        out = folder / f"results-{way.replace(':', '-').replace(',', 'x')}"
        measured = predict(checkpoint, stored, out, way)
        result = out / stored.stem
        first = first or result
        print(json.dumps({"size_px": args.size, "way": way, **measured, **differences(result, first)}), flush=True)


def store_slide(folder: Path, size_px: int) -> Path:
    """Return the stored slide of ``size_px``, drawn and ingested if it is not there."""
    from workflows.benchmarks.ingest_memory import write_slide

    stored = folder / "store" / f"huge-{size_px}.zarr"
    if not stored.exists():
        slide = write_slide(folder / f"huge-{size_px}.svs", size_px, 0.5)
        began_s = time.monotonic()
        _hyfi("ingest", slide, "--out", stored.parent, "--mpp", 0.5)
        print(json.dumps({"size_px": size_px, "ingest_s": round(time.monotonic() - began_s, 1)}), flush=True)
        # The stored slide is enough; the file of a huge one takes gigabytes.
        slide.unlink()
    return stored


def save_network(folder: Path, name: str, width: int, size_px: int) -> Path:
    """Save a checkpoint of a network with random weights; it states that training images had ``size_px``."""
    import torch

    from hyfi_core.models.by_name import build_model
    from hyfi_core.runtime.checkpoint import save_checkpoint

    torch.manual_seed(0)
    described = {"name": name, "classes": 2, "norm": "train", "pool": "avg", "options": {"width": width}}
    weights = build_model(described).state_dict()
    config = {
        "model": described,
        "class_names": ["benign", "malignant"],
        "task": "multiclass",
        "mpp": 0.5,
        "size_px": [size_px, size_px],
        "view": "pack",
        "align_px": 64,
        "tissue": {},
        "normalisation": {"mean": [0.7, 0.7, 0.7], "std": [0.2, 0.2, 0.2]},
        "versions": {"torch": torch.__version__},
        "step": 0,
    }
    save_checkpoint(folder, weights=weights, model=config)
    return folder


def predict(checkpoint: Path, stored: Path, out: Path, way: str) -> dict[str, Any]:
    """Run ``hyfi predict`` in one way; return its seconds and the peak of every rank in MB."""
    ranks, _, cells = way.partition(":")
    words = ["predict", checkpoint, stored, "--out", out, "--tissue", "off", "--overwrite", "--ranks", ranks]
    words += [] if cells in ("", "auto") else ["--cells", cells]
    # One slide, shared by all ranks.
    words += ["--ranks-per-slide", ranks]
    mark, peaks = uuid.uuid4().hex, dict[str, int]()
    began_s = time.monotonic()
    # Ranks inherit the mark, whatever process starts them: it tells them from other processes of the machine.
    with subprocess.Popen(_command(*words), env=os.environ | {_MARK: mark}, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            _note_peaks(peaks, mark, process.pid)
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"hyfi {' '.join(map(str, words))} ended with {process.returncode}")
    return {"seconds": round(time.monotonic() - began_s, 1), "peak_mb": _of_ranks(peaks)}


def _of_ranks(peaks: dict[str, int]) -> list[int]:
    """Return the peaks in MB in the order of ranks; if there are none, that of the process that was started."""
    ranks = sorted((rank for rank in peaks if rank != _STARTED), key=int)
    return [round(peaks[rank] / 1e6) for rank in ranks or peaks]


def _note_peaks(peaks: dict[str, int], mark: str, started: int) -> None:
    """Update ``peaks`` (rank -> bytes) from all marked processes that are ranks, and from the process ``started``."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            if f"{_MARK}={mark}".encode() not in environment:
                continue
            rank = next((line[9:].decode() for line in environment if line.startswith(b"PMI_RANK=")), "")
            status = (entry / "status").read_text()
        except OSError:
            continue
        # Other marked processes, e.g. mpiexec, are no ranks.
        if rank or int(entry.name) == started:
            high = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
            peaks[rank or _STARTED] = max(peaks.get(rank or _STARTED, 0), high)


def differences(result: Path, first: Path) -> dict[str, Any]:
    """Return the largest differences between two results of a slide, and the shape of the maps."""
    import tifffile

    logits, maps = [], []
    for folder in (first, result):
        with tifffile.TiffFile(folder / "heatmap.tiff") as file:
            metadata: Any = tifffile.xml2dict(file.ome_metadata or "")
            annotation = metadata["OME"]["StructuredAnnotations"]["MapAnnotation"]["Value"]["M"]
            maps.append(file.series[0].asarray())
        logits.append(np.array(json.loads(next(entry["value"] for entry in annotation if entry["K"] == "logits"))))
    is_seen = np.isfinite(maps[0])
    # NaN where nothing was shown: equal maps have them in the same places.
    if not np.array_equal(is_seen, np.isfinite(maps[1])):
        raise SystemExit(f"{result}: other squares were seen than in {first}")
    off = [float(np.abs(a[s] - b[s]).max() / np.abs(a[s]).max()) for a, b, s in zip(*maps, is_seen, strict=True)]
    return {
        "logits": logits[1].tolist(),
        "logits_off": float(np.abs(logits[1] - logits[0]).max()),
        "maps_off": max(off),
        "map_px": list(maps[1].shape[1:]),
    }


def _hyfi(*words: object) -> None:
    subprocess.run(_command(*words), check=True, stdout=subprocess.DEVNULL)


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "workflows.cli", *map(str, words)]


if __name__ == "__main__":
    main()
