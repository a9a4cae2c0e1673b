"""Tile encoders that are trained end to end, against plain PyTorch with one graph over all tiles: seconds and memory.

A second table has the memory for more and more tiles. Each way to compute a step runs in a process of its own, so that
memory of one does not count for another. Memory is what a step adds to the process.

    python -m workflows.benchmarks.tiles [--tiles 64] [--width 384] [--depth 12] [--side 224] [--counts 256,1024,4096]
        [--room-mb MB]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

import hyfi_core
from hyfi_core.process_memory import forget_peak, peak_bytes, resident_bytes, return_freed_now, return_what_is_freed

PATCH_PX, CHUNK = 16, 8
SMALL = {"width": 64, "depth": 2, "side": 64}
"""The encoder whose memory is measured for many tiles."""


@dataclass(frozen=True)
class TilesRun:
    """One way to compute steps.

    Attributes:
        way: ``plain`` (PyTorch), ``kept`` (all activations stay) or ``recomputed`` (as far as ``room_bytes`` demands).
        tiles: Tiles of the slide.
        width: Width of the encoder.
        depth: Number of the encoder's blocks.
        side: Height and width of a tile in pixels.
        rounds: Number of timed steps after the first; the fastest counts. 0: the first is timed.
        room_bytes: Limit of the bytes that a step adds to the process; None: no limit.
        chunk: Tiles that are encoded at once.
    """

    way: str
    tiles: int
    width: int
    depth: int
    side: int
    rounds: int
    room_bytes: int | None = None
    chunk: int = CHUNK


class PatchEncoder(nn.Module):
    """A vision transformer without a class token: (n, 3, T, T) to (n, width)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH_PX, PATCH_PX)
        blocks = [
            nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return the mean over patches."""
        vectors: torch.Tensor = self.blocks(self.patches(tiles).flatten(2).transpose(1, 2)).mean(1)
        return vectors


class AttentionHead(nn.Module):
    """Attention pooling: (N, width) to (2,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score, self.classes = nn.Linear(width, 1), nn.Linear(width, 2)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.classes((self.score(vectors).softmax(0) * vectors).sum(0))
        return logits


class DrawnTiles:
    """Tiles of one colour each, made when they are read."""

    coords = None

    def __init__(self, count: int, side: int) -> None:
        self._count, self._side = count, side

    def __len__(self) -> int:
        """Return their number."""
        return self._count

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return (n, 3, T, T) uint8."""
        colours = torch.as_tensor([index % 256 for index in indices], dtype=torch.uint8)
        # Made when read: stored tiles would count as memory of the step.
        return colours[:, None, None, None].expand(-1, 3, self._side, self._side).contiguous()


def step_of(run: TilesRun) -> Callable[[], tuple[int, int]]:
    """Return a function that computes loss and gradients of one slide, and returns (chunks kept, all chunks)."""
    torch.manual_seed(0)
    encoder, head = PatchEncoder(run.width, run.depth), AttentionHead(run.width)
    slide, label = DrawnTiles(run.tiles, run.side), torch.tensor([1])
    if run.way == "plain":

        def plain() -> tuple[int, int]:
            encoder.zero_grad()
            head.zero_grad()
            tiles = slide.read(range(run.tiles)).float() / 255
            nn.functional.cross_entropy(head(encoder(tiles))[None], label).backward()
            return 1, 1

        return plain
    limit = None if run.room_bytes is None else resident_bytes() + run.room_bytes
    engine = hyfi_core.parallelize_tiles(
        encoder, head, hyfi_core.ParallelPlan(tiles=1, memory_bytes=limit), hyfi_core.init(), chunk=run.chunk
    )

    def step() -> tuple[int, int]:
        encoder.zero_grad()
        head.zero_grad()
        engine.accumulate([slide], label)
        return engine.kept

    return step


def measure(run: TilesRun) -> dict[str, float]:
    """Return ``seconds`` of the fastest step, ``bytes`` that steps add to this process, ``peak_bytes`` and ``kept``."""
    return_what_is_freed()
    # A tiny step loads code; memory that it freed goes back to the system, or the measured step would reuse it.
    step_of(replace(run, tiles=run.chunk, room_bytes=None))()
    return_freed_now()
    step = step_of(run)
    before = resident_bytes()
    forget_peak()
    seconds = []
    for _ in range(run.rounds + 1):
        start_s = time.perf_counter()
        kept, _ = step()
        seconds.append(time.perf_counter() - start_s)
    peak = peak_bytes()
    # The shortest, as other processes only add time.
    return {"seconds": min(seconds[1:] or seconds), "bytes": peak - before, "peak_bytes": peak, "kept": kept}


def measured(run: TilesRun) -> dict[str, float]:
    """Return the result of `measure` in a child process."""
    command = [sys.executable, "-m", "workflows.benchmarks.tiles", "--run", json.dumps(asdict(run))]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    values: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return values


def main() -> None:
    """Print seconds and memory of each way, and memory by number of tiles; or, as a child process, measure one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tiles", 64), ("width", 384), ("depth", 12), ("side", 224), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--counts", default="256,1024,4096")
    parser.add_argument(
        "--room-mb", type=int, help="memory of the recomputed steps; default: a quarter of the plain one"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(measure(TilesRun(**json.loads(args.run)))))
        return
    shape: dict[str, Any] = {name: getattr(args, name) for name in ("width", "depth", "side", "rounds")}
    plain = measured(TilesRun("plain", args.tiles, **shape))
    room = int(plain["bytes"] / 4) if args.room_mb is None else args.room_mb * 1_000_000
    ways = {
        "plain, one graph": plain,
        "all kept": measured(TilesRun("kept", args.tiles, **shape)),
        f"at most {room / 1e6:.0f} MB": measured(TilesRun("recomputed", args.tiles, **shape, room_bytes=room)),
    }
    print(f"{args.tiles} tiles of {args.side} px, width {args.width}, {args.depth} blocks, one rank")
    for name, cost in ways.items():
        seconds, size = cost["seconds"], cost["bytes"]
        ratios = f"{seconds / plain['seconds']:.2f} of the seconds, {size / plain['bytes']:.2f} of the memory"
        print(f"  {name:<26}{seconds:8.2f} s {size / 1e6:8.0f} MB   {ratios}")
    print(f"memory by tiles, {SMALL['side']} px, width {SMALL['width']}, {SMALL['depth']} blocks, at most 200 MB")
    first = None
    for count in map(int, args.counts.split(",")):
        cost = measured(TilesRun("recomputed", count, **SMALL, rounds=1, room_bytes=200_000_000))
        first = first or cost["bytes"]
        print(f"  {count:>6} tiles {cost['bytes'] / 1e6:8.0f} MB   {cost['bytes'] / first:.2f} of the first")


if __name__ == "__main__":
    main()
