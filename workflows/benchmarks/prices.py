"""The machine model of ``hyfi_core.cost.machine``, measured: two processes of one thread on this machine.

    python -m workflows.benchmarks.prices [--rounds 200]

Prints a JSON line for each price of ``MachineModel``: what is assumed, what is found, and the
ratio of found to assumed. A message is a halo of one row through ``ops.redistribute``, with all that surrounds it;
bytes are those of one of 1 MiB; flops are those of a 3 x 3 convolution of 64 channels, bytes touched those of a sum of
two maps of 64 MiB, larger than caches, into a new one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machine import DEFAULT_MACHINE
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.box import Box
from hyfi_core.plan.transfer import plan_transfer
from workflows.launch.launch import RANK_SETTINGS
from workflows.launch.mpiexec import find

_LARGE_PX = 2**12
_CHANNELS = 64


def main() -> None:
    """Start two ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        _measure(hyfi_core.init(), given.rounds)
        return
    command = [sys.executable, "-m", "workflows.benchmarks.prices", "--rank", "--rounds", str(given.rounds)]
    subprocess.run(
        [*find().command(2), *command], env={**os.environ, **RANK_SETTINGS, "OMP_NUM_THREADS": "1"}, check=True
    )


def _measure(comm: Communicator, rounds: int) -> None:
    small = _exchange_s(comm, width_px=16, rounds=rounds)
    large = _exchange_s(comm, width_px=_LARGE_PX, rounds=rounds)
    images = torch.randn(1, _CHANNELS, 128, 128).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(_CHANNELS, _CHANNELS, 3, 3).contiguous(memory_format=torch.channels_last)
    large_map = torch.ones(16 * 2**20)
    with torch.no_grad():
        convolved = _median_s(lambda: F.conv2d(images, kernel, padding=1), rounds)
        summed = _median_s(lambda: large_map + large_map, max(5, rounds // 10))
    found = {
        "message_s": small,
        "link_bytes_per_s": _LARGE_PX * _CHANNELS * 4 / (large - small),
        "flops_per_s": 2 * 9 * _CHANNELS**2 * 128**2 / convolved,
        "memory_bytes_per_s": 3 * large_map.numel() * large_map.element_size() / summed,
    }
    if comm.rank == 0:
        for name, value in found.items():
            assumed = getattr(DEFAULT_MACHINE, name)
            line = {"price": name, "assumed": assumed, "found": float(f"{value:.3g}")}
            print(json.dumps({**line, "ratio": round(value / assumed, 2)}), flush=True)


def _exchange_s(comm: Communicator, width_px: int, rounds: int) -> float:
    """Return the median seconds in which both ranks bring each other one row of 64 channels."""
    have = (Box(0, 2, 0, width_px), Box(2, 4, 0, width_px))
    need = (Box(0, 3, 0, width_px), Box(1, 4, 0, width_px))
    op = Redistribute(plan_transfer(have, need, Box(0, 4, 0, width_px), comm.rank))
    own = torch.zeros(1, _CHANNELS, 2, width_px).contiguous(memory_format=torch.channels_last)

    def exchange() -> None:
        op.start(comm, own).wait()

    comm.barrier()
    return _median_s(exchange, rounds)


def _median_s(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
