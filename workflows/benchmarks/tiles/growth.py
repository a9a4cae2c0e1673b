"""Peak of a process that trains on 256, 4,096 and 16,384 tiles, every chunk recomputed: does it grow with tiles?

Each number of tiles runs in processes of its own, one step each, with the same ``memory_bytes``. The encoder is a
vision transformer that is narrower and shallower than a ViT-S. With chunks of 128 tiles, the ratio of its activations
to the vectors of all tiles is that of a ViT-S/16 with chunks of 16 tiles of 224 px.

    python -m workflows.benchmarks.tiles.growth [--counts 256,4096,16384] [--repeats 3] [--room-mb 240]

Prints for each the chunks that are kept, the peak of the process and what the step adds to it, then the ratios of both
to those of the fewest tiles.
"""

from __future__ import annotations

import argparse
from statistics import median

from workflows.benchmarks.tiles.__main__ import TilesRun, measured


def main() -> None:
    """Print a line for each process, then the ratios of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="256,4096,16384")
    for name, default in (("width", 64), ("depth", 6), ("side", 112), ("chunk", 128), ("repeats", 3), ("room-mb", 240)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    counts = sorted(map(int, args.counts.split(",")))
    costs_of: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for _ in range(args.repeats):
        # Counts alternate, so that a slow phase of the machine affects all of them.
        for count in counts:
            room_bytes = args.room_mb * 1_000_000
            # As many chunks of tiles keep their activations as fit into the room; the others are computed again.
            run = TilesRun(
                "recomputed",
                count,
                args.width,
                args.depth,
                args.side,
                rounds=0,
                room_bytes=room_bytes,
                chunk=args.chunk,
            )
            cost = measured(run)
            costs_of[count].append(cost)
            print(
                f"{count:>6} tiles, {cost['kept']:.0f} of {-(-count // args.chunk)} chunks kept: peak "
                f"{cost['peak_bytes'] / 1e6:.1f} MB, {cost['bytes'] / 1e6:.1f} of them added, {cost['seconds']:.0f} s",
                flush=True,
            )
    for key, name in (("peak_bytes", "peak of the process"), ("bytes", "added")):
        middle = {count: median(cost[key] for cost in costs) for count, costs in costs_of.items()}
        ratios = ", ".join(f"{count} tiles {value / middle[counts[0]]:.3f}" for count, value in middle.items())
        print(f"{name}, median of {args.repeats}, relative to {counts[0]} tiles: {ratios}")


if __name__ == "__main__":
    main()
