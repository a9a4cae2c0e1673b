"""``memory_bytes`` is a promise about the process, however many tiles a slide has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from workflows.benchmarks.tiles.__main__ import SMALL, TilesRun

ROOM_BYTES = 100_000_000


def added_bytes(run: TilesRun) -> float:
    command = [sys.executable, "-m", "workflows.benchmarks.tiles", "--run", json.dumps(asdict(run))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: float = json.loads(done.stdout.splitlines()[-1])["bytes"]
    return found


def test_the_peak_of_a_step_is_below_the_limit_and_the_next_step_fits_too() -> None:
    """Chunks of a small encoder: what the allocator holds besides their tensors is the larger part."""
    assert added_bytes(TilesRun("recomputed", 640, **SMALL, rounds=1, room_bytes=ROOM_BYTES)) <= ROOM_BYTES


def test_holes_in_the_heap_do_not_exceed_the_limit() -> None:
    """Activations of 1 to 16 MB, of chunks that are all computed again, left holes of as much memory again."""
    run = TilesRun("recomputed", 384, 64, 2, 112, 0, 115_000_000, chunk=128)
    assert added_bytes(run) <= 115_000_000
