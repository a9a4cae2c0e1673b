"""One part of a check, as a process or as the ranks of a job: ``python -m workflows.gpu_check.child BODY ARGUMENT …``.

Prints each row as one JSON line, as soon as it is measured: rows before a time limit are not lost.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from data.children import die_with_parent
from workflows.console import emit_json
from workflows.gpu_check.commands import commands
from workflows.gpu_check.equality import equal
from workflows.gpu_check.measure_step import Row
from workflows.gpu_check.profile import profile
from workflows.gpu_check.programs import machine, tests
from workflows.gpu_check.room import cells, largest, memory, pieces
from workflows.gpu_check.setting import FULL, SMALL, Setting
from workflows.gpu_check.speed import background, compiled, feed, speed, staged

BODIES: dict[str, Callable[[Setting, str], Iterator[Row]]] = {
    body.__name__: body
    for body in (
        *(equal, tests, commands, speed, background, compiled, profile, staged, feed),
        *(cells, pieces, largest, memory, machine),
    )
}


def main() -> None:
    """Run the part of the command line, and print each of its rows as JSON as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("body", choices=BODIES)
    parser.add_argument("argument", nargs="?", default="")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for this part")
    args = parser.parse_args()
    deadline_s = time.monotonic() + args.seconds
    # A part that outlives the check would keep the GPU's memory.
    die_with_parent()
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if args.device == "cuda":
        torch.cuda.set_device(number)
        setting = Setting(torch.device("cuda", number), FULL, args.out, deadline_s)
    else:
        torch.set_num_threads(1)
        setting = Setting(torch.device("cpu"), SMALL, args.out, deadline_s)
    for row in BODIES[args.body](setting, args.argument):
        # Flushed: rows before a time limit are kept.
        emit_json(row)


if __name__ == "__main__":
    main()
