"""`hyfi features` beside a plain loop of the encoder over tiles in memory, and beside reading alone: tiles each second.

python -m workflows.benchmarks.features SLIDE [--width 384] [--depth 12] [--mpp 0.5] [--workers 1]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
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


def fastest_s(act: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slide", type=Path)
    parser.add_argument("--mpp", type=float, help="of tiles; default: the store's finest")
    for name, default in (("width", 384), ("depth", 12), ("side", 224), ("workers", 1), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        pathology.ingest_slides(args.slide, store, mpp=0.5 if args.mpp is None else min(0.5, args.mpp))
        measure(store, Path(scratch), args)


def measure(store: Path, scratch: Path, args: argparse.Namespace) -> None:
    """Measure the three ways on the first slide of a store, and print them."""
    (slide_id,) = slide_ids(store)
    encoder = load_encoder(NAME, size_px=args.side, options={"width": args.width, "depth": args.depth})
    tiling = Tiling(args.side, mpp=args.mpp)
    slide = open_store(store, slide_id)
    tiles = tissue_tiles(slide, tiling)
    starts = range(0, len(tiles), BATCH)
    in_memory = [StoreTiles(slide, tiles).read(range(k, min(k + BATCH, len(tiles)))) for k in starts]

    def read() -> None:
        reader = StoreTiles(slide, tiles, threads=args.workers)
        for k in starts:
            reader.read(range(k, min(k + BATCH, len(tiles))))

    def encode_slide() -> None:
        with tempfile.TemporaryDirectory(dir=scratch) as out:
            folder = FeatureFolder(Path(out), "zarr", {})
            folder.begin()
            run = EncodingRun(store, encoder, folder, tiling, "float32", BATCH, args.workers)
            encode_slides(run, [slide_id], FeatureReport(), lambda share, name: None, print)

    plain_s = fastest_s(lambda: [encoder.encode(batch) for batch in in_memory], args.rounds)
    print(f"{len(tiles)} tiles of {args.side} px, width {args.width}, {args.depth} blocks, {args.workers} workers")
    for name, seconds in (
        ("encoder, tiles in memory", plain_s),
        ("features: read, encoded, written", fastest_s(encode_slide, args.rounds)),
        ("only read", fastest_s(read, args.rounds)),
    ):
        print(f"  {name:<34}{len(tiles) / seconds:9.1f} tiles/s   {plain_s / seconds:7.2f} of the first")


if __name__ == "__main__":
    main()
