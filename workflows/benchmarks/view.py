"""Benchmark of the viewer: time of tiles, and its memory.

    python -m workflows.benchmarks.view SLIDE_OR_STORE... [--tiles 300] [--gigapixel PX]

For each slide a new viewer serves randomly chosen tiles: ``cold``, when nothing is decoded, and ``warm``, the same
tiles again. Times are from the request to the last byte, over HTTP, one request at a time. Tiles per second are
computed from the server's CPU time, as on one core. ``--gigapixel PX`` adds a synthetic slide of PX × PX pixels at 0.25
µm, which repeats one JPEG tile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import simplejpeg
import tifffile

from workflows.benchmarks.one_core import cpu_s


@dataclass(frozen=True)
class Served:
    """Times of a series of requests: milliseconds of each, and CPU seconds of the server for all of them."""

    milliseconds: list[float]
    cpu_s: float

    def describe(self) -> str:
        """Return the times as one line of text."""
        ordered = sorted(self.milliseconds)
        return (
            f"median {statistics.median(ordered):5.1f} ms, 95 % {ordered[int(0.95 * len(ordered))]:6.1f} ms, "
            f"{len(ordered) / self.cpu_s:5.0f} tiles/s on one core"
        )


def main() -> None:
    """Print the times of tiles, and the peak memory of the viewer, for each given slide and for the synthetic one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--tiles", type=int, default=300)
    parser.add_argument("--gigapixel", type=int)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        synthetic = [draw(Path(folder), arguments.gigapixel)] if arguments.gigapixel else []
        for path in [*arguments.paths, *synthetic]:
            measure(path, arguments.tiles)


def measure(path: Path, count: int) -> None:
    """Serve a slide, or the first of a store, and print a line for each kind of tile."""
    command = [sys.executable, "-m", "workflows.cli", "view", str(path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            (first, *_) = _json(f"{address}slides.json")["slides"]
            slide = f"{address}slide/{quote(first['key'])}"
            about = _json(f"{slide}/about.json")
            print(f"{path.name}: {about['width_px']} × {about['height_px']} px")
            _series(server.pid, slide, about, count)
            print(f"  peak memory of the server: {_status_mib(server.pid, 'VmHWM'):.0f} MiB")
        finally:
            server.terminate()


def _series(pid: int, slide: str, about: dict[str, Any], count: int) -> None:
    """Print how fast a viewer serves tiles of a slide that nothing has decoded yet, and then the same tiles again.

    Args:
        pid: Process of the viewer, whose CPU time counts.
        slide: Address of the slide.
        about: Its ``about.json``.
        count: Number of tiles.
    """
    finest = about["finest_zoom"]
    zooms = {"1 : 1, PNG": ([finest], "png"), "zoomed out, JPEG": (list(range(max(0, finest - 4), finest)), "jpg")}
    for name, (levels, kind) in zooms.items():
        places = list(_places(about, levels, count))
        for state in ("cold", "warm"):
            served = _fetch(pid, [f"{slide}/tile/{z}/{y}/{x}.{kind}" for z, y, x in places])
            print(f"  {name:18} {state}: {served.describe()}")


def _places(about: dict[str, Any], levels: Sequence[int], count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (zoom, row, column) of ``count`` tiles, or a few more, as a user views them: 3 × 4 neighbours at a time."""
    generator = random.Random(0)
    for k in range(0, count, 12):
        zoom = levels[k // 12 % len(levels)]
        scale = about["tile_px"] * 2 ** (about["finest_zoom"] - zoom)
        rows, columns = -(-about["height_px"] // scale), -(-about["width_px"] // scale)
        row, column = generator.randrange(max(1, rows - 3)), generator.randrange(max(1, columns - 4))
        for n in range(12):
            yield zoom, min(rows - 1, row + n // 4), min(columns - 1, column + n % 4)


def _fetch(pid: int, addresses: Sequence[str]) -> Served:
    """Request addresses one after the other; return the milliseconds of each, and the CPU seconds of the server."""
    parts = urlsplit(addresses[0])
    connection = HTTPConnection(parts.hostname or "", parts.port)
    before, times_ms = cpu_s(pid), []
    for address in addresses:
        start = time.perf_counter()
        connection.request("GET", urlsplit(address).path)
        answer = connection.getresponse()
        data = answer.read()
        times_ms.append(1e3 * (time.perf_counter() - start))
        if answer.status != 200 or not data:
            raise SystemExit(f"{address}: {answer.status} {data[:200]!r}")
    connection.close()
    return Served(times_ms, cpu_s(pid) - before)


def draw(folder: Path, side_px: int) -> Path:
    """Write a pyramidal TIFF of ``side_px`` × ``side_px`` that repeats one encoded tile, and return its path."""
    # 32 × 32 random colours, each a block of 8 × 8 pixels.
    grain = np.random.default_rng(0).integers(110, 230, (32, 32, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    tile = simplejpeg.encode_jpeg(np.ascontiguousarray(grain), quality=80, colorspace="RGB", colorsubsampling="420")
    path, side = folder / "gigapixel.tiff", side_px
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        while side >= 256:
            file.write(
                itertools.repeat(tile, (-(-side // 256)) ** 2),
                shape=(side, side, 3),
                dtype=np.uint8,
                photometric="ycbcr",
                subsampling=(2, 2),
                tile=(256, 256),
                compression="jpeg",
                resolution=(40000, 40000),
                resolutionunit="CENTIMETER",
                subfiletype=int(side != side_px),
                metadata=None,
            )
            side //= 4
    return path


def _json(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)


def _status_mib(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
