"""Benchmark of the store: writing and reading slides, against other libraries in the same run.

    python -m workflows.benchmarks.store SLIDE.svs [--runs 3]

Libraries that are not installed are skipped: ``pip install -e .[test,rivals]``. Everything written is synced. Every
line is a median. ``ratio`` is the other library's seconds per megapixel divided by ours, in wall-clock and in CPU time;
on a busy machine, CPU time is more reliable.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from data.cores import usable_cores
from data.store.layout import pyramid_levels
from data.store.slide_store import SlideStore, slide_path
from data.store.writer import SlideWriter
from hyfi_core.plan.box import Box
from hyfi_core.process_memory import forget_peak, peak_bytes
from pathology.arrays import Planes
from pathology.ingest.options import IngestOptions
from pathology.ingest.pyramid import PyramidBuilder, level_sizes
from pathology.ingest.slide import ingest_slide
from pathology.readers.sources import open_source

READ_PX = 8192
THREADS = usable_cores()


@dataclass(frozen=True)
class Timing:
    """What was timed: median wall-clock seconds, and CPU seconds of all threads, for so many megapixels."""

    name: str
    seconds: float
    cpu_s: float
    megapixels: float

    @property
    def rate(self) -> float:
        """Megapixels per second."""
        return self.megapixels / self.seconds


def main() -> None:
    """Measure writing and reading of the slide, by this project and by other libraries, and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("slide", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        measure(arguments.slide, Path(folder), arguments.runs)


def measure(path: Path, folder: Path, runs: int) -> None:
    """Measure writing and reading of one slide; print a line for each library."""
    source = open_source(path)
    mpp = sum(source.mpp or (1.0, 1.0)) / 2
    size = source.levels[0]
    megapixels = size.height_px * size.width_px / 1e6
    region = _region(size.height_px, size.width_px)
    pixels = np.ascontiguousarray(source.read(region, 0).transpose(2, 0, 1))
    source.close()
    print(f"{path.name}: {size.width_px} × {size.height_px} px, {mpp:.3f} µm/px, {THREADS} cores, {runs} runs")

    # At the slide's own microns per pixel: all of its pixels are stored.
    kinds = {"ingest to zstd": IngestOptions(mpp=mpp), "ingest --lossless": IngestOptions(mpp=mpp, lossless=True)}
    ours = {
        name: _timed(name, runs, megapixels, folder, functools.partial(_ingest, path, options=o))
        for name, o in kinds.items()
    }
    writer = _timed("our writer, from memory", runs, region.area / 1e6, folder, lambda out: _write(pixels, out))
    vips = _timed("libvips tiffsave", runs, megapixels, folder, lambda out: _vips(path, out / "vips.tif"))
    ome = _timed("ome-zarr-py", runs, region.area / 1e6, folder, lambda out: _ome_zarr(pixels, out))
    for timing, rival in (
        (ours["ingest to zstd"], vips),
        (ours["ingest --lossless"], vips),
        (ours["ingest to zstd"], ome),
        (writer, ome),
    ):
        _compare(timing, rival)
    _sizes(path, folder, kinds)
    _reading(slide_path(folder / "ingest to zstd", slide_id="s"), region, runs)
    for name, options in kinds.items():
        print(f"memory growth of {name}: {_growth(path, folder, options) / 2**20:.0f} MiB")


def _region(height: int, width: int) -> Box:
    """Return a square of `READ_PX` in the middle of a slide, or as much as the slide has."""
    y, x = max(0, (height - READ_PX) // 2), max(0, (width - READ_PX) // 2)
    return Box(y, min(height, y + READ_PX), x, min(width, x + READ_PX))


def _timed(name: str, runs: int, megapixels: float, folder: Path, work: Callable[[Path], object]) -> Timing | None:
    """Time ``work`` on an empty folder ``name``, which is kept; return None if the library is not installed."""
    seconds, cpu = [], []
    for _ in range(runs):
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        # Otherwise, the system would write the files of earlier runs to disk during this one.
        os.sync()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        try:
            work(out)
        except ImportError as error:
            print(f"{name}: not installed ({error.name})")
            return None
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
    return _printed(Timing(name, statistics.median(seconds), statistics.median(cpu), megapixels))


def _printed(timing: Timing) -> Timing:
    print(f"{timing.name:28} {timing.seconds:7.2f} s {timing.rate:6.0f} MP/s   CPU {timing.cpu_s:6.2f} s")
    return timing


def _compare(ours: Timing | None, rival: Timing | None) -> None:
    """Print the rival's seconds per megapixel divided by ours, of wall clock and of CPU, if both were measured."""
    if ours and rival:
        cpu = (rival.cpu_s / rival.megapixels) / (ours.cpu_s / ours.megapixels)
        print(f"ratio {ours.rate / rival.rate:6.2f}   by CPU time {cpu:6.2f}   {ours.name} : {rival.name}")


def _ingest(path: Path, out: Path, options: IngestOptions) -> None:
    record = ingest_slide(path, out, options, slide_id="s")
    if record.status != "done":
        raise RuntimeError(record.reason)


def _write(pixels: Planes, out: Path) -> None:
    """Write a pyramid and a store from pixels in memory."""
    sizes = level_sizes(pixels.shape[1], pixels.shape[2], at_least=1)
    with SlideWriter(out, "s", pyramid_levels(sizes, 1.0)) as writer:
        PyramidBuilder(sizes, lambda box: pixels[(slice(None), *box.slices())], writer.write).build()
        writer.write_tissue(np.ones((1, 1), bool), 8.0)
        writer.publish({"kind": "resampled"})


def _vips(path: Path, out: Path) -> None:
    """Write the slide with libvips as a TIFF, and sync it."""
    import pyvips

    image = pyvips.Image.new_from_file(str(path), access="sequential")
    image.extract_band(0, n=3).tiffsave(
        str(out), tile=True, tile_width=256, tile_height=256, pyramid=True, compression="jpeg", Q=75, bigtiff=True
    )
    _sync(out)


def _ome_zarr(pixels: Planes, out: Path) -> None:
    """Write the pixels with ome-zarr-py, and sync them."""
    import zarr
    from ome_zarr.format import FormatV05
    from ome_zarr.writer import write_image

    group = zarr.open_group(str(out / "s.zarr"), mode="w", zarr_format=3)
    write_image(pixels, group, axes="cyx", fmt=FormatV05(), storage_options={"chunks": (3, 512, 512)})
    # Every library's files are synced: one that leaves data in the disk's cache would look faster.
    _sync(*(f for f in (out / "s.zarr").rglob("*") if f.is_file()))


def _sync(*paths: Path) -> None:
    from hyfi_core.files import sync_file

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(sync_file, paths))


def _reading(path: Path, region: Box, runs: int) -> None:
    """Time the reading of a region by our reader, zarr-python and tensorstore, and compare what they return."""
    slide = SlideStore.open(path)
    out = np.empty((3, *region.shape), np.uint8)
    box = region.slices()
    ours = _timed_read("read, our reader", runs, region, lambda: slide.read(region, 0, THREADS, out))
    import zarr

    array: Any = zarr.open_group(path, mode="r")["0"]
    _compare(ours, _timed_read("read, zarr-python", runs, region, lambda: array[(slice(None), *box)]))
    try:
        import tensorstore
    except ImportError:
        print("tensorstore: not installed")
        return
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / "0")}}
    opened = tensorstore.open(spec, open=True).result()
    _compare(ours, _timed_read("read, tensorstore", runs, region, lambda: opened[(slice(None), *box)].read().result()))


def _timed_read(name: str, runs: int, region: Box, work: Callable[[], object]) -> Timing:
    """Print and return the median seconds of ``work``, of wall clock and of CPU."""
    seconds, cpu = [], []
    for _ in range(runs + 1):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
    # The first call, which fills caches, does not count.
    return _printed(Timing(name, statistics.median(seconds[1:]), statistics.median(cpu[1:]), region.area / 1e6))


def _sizes(path: Path, folder: Path, kinds: dict[str, IngestOptions]) -> None:
    print(f"size of the slide's file: {path.stat().st_size / 1e6:.1f} MB")
    for name in [*kinds, "libvips tiffsave"]:
        size = sum(f.stat().st_size for f in (folder / name).rglob("*") if f.is_file())
        print(f"size after {name}: {size / 1e6:.1f} MB")


def _growth(path: Path, folder: Path, options: IngestOptions) -> int:
    """Return the growth in bytes of the peak memory of a new process that ingests the slide."""
    # Not a fork, which would start with this process's memory.
    context = get_context("spawn")
    results = context.SimpleQueue()
    out = folder / "memory"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    process = context.Process(target=_grow, args=(path, out, options, results))
    process.start()
    process.join()
    return int(results.get())


def _grow(path: Path, out: Path, options: IngestOptions, results: Any) -> None:
    forget_peak()
    before = peak_bytes()
    _ingest(path, out, options)
    results.put(peak_bytes() - before)


if __name__ == "__main__":
    main()
