"""``memory_bytes`` is a promise about the process, however many tiles a slide has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from workflows.benchmarks.tiles.__main__ import SMALL, TilesRun

ROOM_BYTES = 100_000_000


def test_the_peak_of_a_step_is_below_the_limit_and_the_next_step_fits_too() -> None:
    """Chunks of a small encoder: what the allocator holds besides their tensors is the larger part."""
    run = TilesRun("recomputed", 640, **SMALL, rounds=1, room_bytes=ROOM_BYTES)
    command = [sys.executable, "-m", "workflows.benchmarks.tiles", "--run", json.dumps(asdict(run))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert json.loads(done.stdout.splitlines()[-1])["bytes"] <= ROOM_BYTES
