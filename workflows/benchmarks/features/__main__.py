"""`hyfi features` against a plain loop of the encoder over tiles in memory, and against reading alone, in tiles/s.

python -m workflows.benchmarks.features SLIDE [--width 384] [--depth 12] [--mpp 0.5] [--workers 1] [--rounds 2]

The three take turns; the fastest round of each counts. On cores that other processes use, too, compare processor time,
which counts all threads and the reading processes. The difference between features and the encoder is the cost of
reading and writing if all cores are busy; with a free core, it is smaller.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pathology
from data import open_store, slide_ids
from data.tiles.reader import StoreTiles
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import tissue_tiles
from workflows.encoders.load import load_encoder
from workflows.features.compute import EncodingRun, FeatureReport, encode_slides
from workflows.features.feature_folder import FeatureFolder

BATCH = 32
NAME = "workflows.benchmarks.features.encoder:vision_transformer"


@dataclass(frozen=True)
class Cost:
    """The time of a call.

    Attributes:
        clock_s: Seconds of the clock.
        cpu_s: Seconds of the processor, of this process and of its children that have ended.
    """

    clock_s: float
    cpu_s: float

    @classmethod
    def of(cls, act: Callable[[], object]) -> Cost:
        """Return the cost of one call."""
        start_s, start_cpu_s = time.perf_counter(), _cpu_s()
        act()
        return cls(time.perf_counter() - start_s, _cpu_s() - start_cpu_s)


def _cpu_s() -> float:
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


def main() -> None:
    """Ingest the slide, and print tiles/s of the encoder in a plain loop, of `hyfi features` and of reading alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slide", type=Path)
    parser.add_argument("--mpp", type=float, help="of tiles; default: the store's finest")
    # Width and depth of the encoder, side of a tile in pixels, reading processes, and how often each is timed.
    for name, default in (("width", 384), ("depth", 12), ("side", 224), ("workers", 1), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        # A store cannot show tiles finer than itself.
        pathology.ingest_slides(args.slide, store, mpp=0.5 if args.mpp is None else min(0.5, args.mpp))
        measure(store, Path(scratch), args)


def measure(store: Path, scratch: Path, args: argparse.Namespace) -> None:
    """Measure encoder, features and reading on the only slide of a store, and print a table."""
    (slide_id,) = slide_ids(store)
    encoder = load_encoder(NAME, size_px=args.side, options={"width": args.width, "depth": args.depth})
    tiling = Tiling(args.side, mpp=args.mpp)
    slide = open_store(store, slide_id)
    tiles = tissue_tiles(slide, tiling)
    starts = range(0, len(tiles), BATCH)
    # The plain loop of the encoder takes its tiles from memory.
    in_memory = [StoreTiles(slide, tiles).read(range(k, min(k + BATCH, len(tiles)))) for k in starts]

    def only_read() -> None:
        reader = StoreTiles(slide, tiles, threads=args.workers)
        for k in starts:
            reader.read(range(k, min(k + BATCH, len(tiles))))

    def encode_slide() -> None:
        with tempfile.TemporaryDirectory(dir=scratch) as out:
            folder = FeatureFolder(Path(out), "zarr", {})
            folder.begin()
            run = EncodingRun(store, encoder, folder, tiling, "float32", BATCH, args.workers)
            encode_slides(run, [slide_id], FeatureReport(), lambda share, name: None, print)

    ways: dict[str, Callable[[], object]] = {
        "encoder, tiles in memory": lambda: [encoder.encode(batch) for batch in in_memory],
        "features: read, encoded, written": encode_slide,
        "only read": only_read,
    }
    for act in ways.values():
        act()  # loads code that is used for the first time
    rounds = [{name: Cost.of(act) for name, act in ways.items()} for _ in range(args.rounds)]
    print(f"{len(tiles)} tiles of {args.side} px, width {args.width}, {args.depth} blocks, {args.workers} workers")
    print(f"  {'':<34}{'tiles/s':>9}{'of the first':>14}{'tiles/s of processor':>22}{'of the first':>14}")
    first: list[float] = []
    for name in ways:
        fastest = [min(getattr(costs[name], kind) for costs in rounds) for kind in ("clock_s", "cpu_s")]
        first = first or fastest
        columns = [(len(tiles) / s, of_first / s) for s, of_first in zip(fastest, first, strict=True)]
        (clock, clock_ratio), (cpu, cpu_ratio) = columns
        print(f"  {name:<34}{clock:9.1f}{clock_ratio:14.2f}{cpu:22.1f}{cpu_ratio:14.3f}")


if __name__ == "__main__":
    main()
