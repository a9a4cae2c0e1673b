"""Benchmark of decoding: this project's reader against OpenSlide, each with two threads, in turns.

    python -m workflows.benchmarks.decode [SLIDE ...] [--size 20480] [--region 8192] [--rounds 5] [--threads 2]

Prints a JSON line for each slide: megapixels per second (medians over the rounds) and their ratio, for a square region
in the middle of the finest level. In addition to the given slides, an SVS of ``--size`` is written, which repeats the
tiles of a synthetic slide. The files are in the page cache, so that decoding is measured, not the disk. OpenSlide reads
strips of 1024 rows with one handle for each thread, which is its fastest use; its RGBA pixels are not converted. Both
readers are first checked to return the same pixels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tifffile

from hyfi_core.plan.box import Box
from pathology.readers.openslide_source import OpenSlideSource, open_handle
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB
from pathology.readers.sources import open_source
from pathology.readers.threads import set_decode_threads
from pathology.synthetic.anatomy import SlideSpec
from pathology.synthetic.placing import make_anatomy
from pathology.synthetic.tiff import write_slide

_MOTIF_PX = 2048
_TILE_PX = 256
_LEVELS = 4
"""Levels of 2048, 1024, 512 and 256 px, in which the motif consists of whole tiles."""
_STRIP_PX = 1024
_ABOUT = "Aperio Image Library (made for a benchmark)\r\n{size}x{size} (256x256) JPEG/RGB Q=88|AppMag = 20|MPP = 0.5"


def main() -> None:
    """Measure the given slides and a synthetic one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slides", type=Path, nargs="*")
    parser.add_argument(
        "--size", type=int, default=20_480, help="height and width of a synthetic slide in pixels; 0: none"
    )
    parser.add_argument("--region", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    set_decode_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        synthetic = [write_large_svs(Path(folder) / f"synthetic_{args.size}.svs", args.size)] if args.size else []
        for path in [*args.slides, *synthetic]:
            print(json.dumps(compare(path, args.region, args.rounds, args.threads)), flush=True)


def compare(path: Path, region_px: int, rounds: int, threads: int) -> dict[str, object]:
    """Return the median rates of both readers, in megapixels per second, for a square in the middle of a slide."""
    source = open_source(path)
    finest = source.levels[0]
    height, width = min(region_px, finest.height_px), min(region_px, finest.width_px)
    y, x = ((full - part) // 2 for full, part in ((finest.height_px, height), (finest.width_px, width)))
    box = Box(y, y + height, x, x + width)
    out: RGB = np.empty((*box.shape, 3), np.uint8)
    planes: RGB = np.empty((3, *box.shape), np.uint8)
    # Planes are what the ingest reads into: a transposed view of them is filled.
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: source.read_into(box, 0, out),
        "ours_as_planes": lambda: source.read_into(box, 0, planes.transpose(1, 2, 0)),
        "openslide": lambda: _read_with_openslide(path, box, threads),
    }
    _check_equal(source, path, box)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds + 1):
        for side, read in sides.items():
            start = time.perf_counter()
            read()
            seconds[side].append(time.perf_counter() - start)
    # Without the first round, which opens files and fills caches.
    rate = {side: box.area / 1e6 / statistics.median(times[1:]) for side, times in seconds.items()}
    return {
        "slide": path.name,
        "region_px": list(box.shape),
        "threads": threads,
        "reader": type(source).__name__,
        **{f"{side}_mp_s": round(value, 1) for side, value in rate.items()},
        "ours_to_openslide": round(rate["ours"] / rate["openslide"], 2),
        "ours_as_planes_to_openslide": round(rate["ours_as_planes"] / rate["openslide"], 2),
    }


def _check_equal(source: SlideSource, path: Path, box: Box) -> None:
    """Stop if OpenSlide returns other pixels than ``source`` in a corner of the box."""
    corner = Box(box.y0, min(box.y1, box.y0 + 2048), box.x0, min(box.x1, box.x0 + 2048))
    # Times of readers that decode differently cannot be compared.
    slow = OpenSlideSource(path)
    if not np.array_equal(source.read(corner, 0), slow.read(corner, 0)):
        raise SystemExit(f"{path}: the two readers return different pixels; nothing was measured")
    slow.close()


def _read_with_openslide(path: Path, box: Box, threads: int) -> None:
    """Read a box with OpenSlide in strips, each thread with a handle of its own."""
    strips = [Box(y, min(y + _STRIP_PX, box.y1), box.x0, box.x1) for y in range(box.y0, box.y1, _STRIP_PX)]

    def read(thread: int) -> None:
        with open_handle(path) as slide:
            # Thread k of n reads the strips k, k + n, …, so that all threads end at about the same time.
            for strip in strips[thread::threads]:
                slide.read_region((strip.x0, strip.y0), 0, (strip.width, strip.height))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def write_large_svs(path: Path, size_px: int) -> Path:
    """Write an SVS of ``size_px`` × ``size_px`` with downsamples 1, 2, 4, 8 that repeats a synthetic slide's tiles."""
    motif = path.with_name("motif.tiff")
    write_slide(make_anatomy(SlideSpec(seed=0, index=0, case=0, size_px=_MOTIF_PX, positive=True)), motif)
    with tifffile.TiffFile(motif) as read, tifffile.TiffWriter(path, bigtiff=True) as tiff:
        for page in range(_LEVELS):
            # Levels of 1, 1/2, 1/4, 1/8.
            side = size_px >> page
            tiff.write(
                _tiles(read.pages[page], -(-side // _TILE_PX)),
                shape=(side, side, 3),
                dtype=np.uint8,
                photometric="ycbcr",
                subsampling=(2, 2),
                compression="jpeg",
                tile=(_TILE_PX, _TILE_PX),
                description=_ABOUT.format(size=size_px),
                metadata=None,
            )
    motif.unlink()
    return path


def _tiles(page: tifffile.TiffPage | tifffile.TiffFrame, count: int) -> Iterator[bytes]:
    """Yield ``count × count`` encoded tiles: the page's own, repeated in both directions."""
    tiles = []
    for offset, length in zip(page.dataoffsets, page.databytecounts, strict=True):
        page.parent.filehandle.seek(offset)
        tiles.append(page.parent.filehandle.read(length))
    own = round(len(tiles) ** 0.5)
    for row in range(count):
        for column in range(count):
            # The encoded bytes are copied: no pixel is encoded again.
            yield tiles[row % own * own + column % own]


if __name__ == "__main__":
    main()
