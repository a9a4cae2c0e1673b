"""Benchmark of an ingest's memory by slide size: growth of one worker, and its ratio to the first size.

    python -m workflows.benchmarks.ingest_memory [--size 20480 40960] [--mpp 0.5] [--folder DIR] [--threads 2]

Each slide is a tiled JPEG of ``--mpp`` that repeats a small synthetic slide. It is ingested at its own resolution with
pyramid, mask, blur, stains and thumbnail, in a process like an ingest's workers. Growth is the process's peak resident
memory (VmHWM) less its memory after the imports. Prints a JSON line for each size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hyfi_core.process_memory import peak_bytes, resident_bytes

TILE_PX = 256
_PATTERN_PX = 4096


def main() -> None:
    """Measure each size in its own process; or, as such a process, one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[20480, 40960])
    parser.add_argument("--mpp", type=float, default=0.5, help="microns per pixel stated in the slides")
    parser.add_argument("--folder", type=Path, help="folder for slides and stores; default: a temporary folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slide", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.slide is not None:
        print(json.dumps(measure(args.slide, args.mpp, args.threads)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        first = None
        for size in args.size:
            slide = write_slide(Path(folder) / f"{size}.svs", size, args.mpp)
            command = [sys.executable, "-m", "workflows.benchmarks.ingest_memory", "--slide", str(slide)]
            command += ["--threads", str(args.threads), "--mpp", str(args.mpp)]
            completed = subprocess.run(command, capture_output=True, text=True, check=True)
            measured = json.loads(completed.stdout.splitlines()[-1])
            first = first or measured["growth_mb"]
            print(
                json.dumps({"size_px": size, **measured, "to_first": round(measured["growth_mb"] / first, 3)}),
                flush=True,
            )
            # Removed at once: the files of all sizes might not fit on the disk.
            slide.unlink()


def measure(slide: Path, mpp_um: float, threads: int) -> dict[str, float]:
    """Ingest ``slide`` in this process and return its memory in MB and seconds."""
    from hyfi_core.process_memory import return_what_is_freed
    from pathology.ingest.archive import IngestOptions, ingest_slide
    from pathology.ingest.contact import write_picture
    from pathology.readers.threads import set_decode_threads

    set_decode_threads(threads)
    return_what_is_freed()
    before = resident_bytes()
    began_s = time.monotonic()
    record = ingest_slide(slide, slide.parent / "store", IngestOptions(mpp=mpp_um), threads=threads)
    if record.status != "done":
        raise SystemExit(record.reason)
    # `hyfi ingest` draws the picture of a slide, too, after it is ingested.
    write_picture(slide.parent / "store", record.slide_id)
    growth = peak_bytes() - before
    return {
        "imported_mb": round(before / 1e6, 1),
        "growth_mb": round(growth / 1e6, 1),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def write_slide(path: Path, size_px: int, mpp_um: float) -> Path:
    """Write a tiled JPEG slide of ``size_px`` × ``size_px`` that repeats a small synthetic one; return its path."""
    import imagecodecs
    import numpy as np
    import tifffile

    from hyfi_core.plan.box import Box
    from pathology.synthetic.anatomy import SlideSpec
    from pathology.synthetic.placing import make_anatomy
    from pathology.synthetic.render import Renderer

    spec = SlideSpec(seed=3, index=0, case=0, size_px=_PATTERN_PX, positive=False, mpp_um=0.5)
    renderer, per_row = Renderer(make_anatomy(spec)), _PATTERN_PX // TILE_PX
    rows = []
    for y in range(per_row):
        band = renderer.read(Box(y * TILE_PX, (y + 1) * TILE_PX, 0, _PATTERN_PX))
        tiles = [np.ascontiguousarray(band[:, x * TILE_PX : (x + 1) * TILE_PX]) for x in range(per_row)]
        rows.append([bytes(imagecodecs.jpeg8_encode(tile, level=80, subsampling="420")) for tile in tiles])

    def repeated() -> Iterator[bytes]:
        for y in range(size_px // TILE_PX):
            for x in range(size_px // TILE_PX):
                # Tiles are encoded once; a slide of any size takes no time to draw.
                yield rows[y % per_row][x % per_row]

    description = f"Aperio Image Library v12\r\n{size_px}x{size_px} (256x256) JPEG|AppMag = 20|MPP = {mpp_um}"
    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        tiff.write(
            repeated(),
            shape=(size_px, size_px, 3),
            dtype=np.uint8,
            photometric="ycbcr",
            subsampling=(2, 2),
            compression="jpeg",
            tile=(TILE_PX, TILE_PX),
            description=description,
            metadata=None,
        )
    return path


if __name__ == "__main__":
    main()
