"""The parts of a check, in their order."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Literal

from workflows.gpu_check.setting import CHANNELS_LAST, CheckSizes
from workflows.launch.mpiexec import find_mpiexec

Launcher = Literal["none", "mpiexec", "torchrun"]

NETWORKS = ("resnet18", "amoebanet", "third party")
EQUAL_WEIGHT = 5.0  # less than its seconds: several run at once
RANKS: tuple[tuple[int, Launcher], ...] = ((1, "none"), (2, "mpiexec"), (4, "mpiexec"))
EQUAL_PLANS: dict[str, tuple[int, Launcher]] = {
    "pipeline": (2, "mpiexec"),
    "gems": (2, "mpiexec"),
    "chimera": (2, "mpiexec"),
    "replicas": (4, "mpiexec"),
    "cells": (1, "none"),
    "cells, spilled": (1, "none"),
    "recomputed": (2, "mpiexec"),
    "fused halos": (2, "mpiexec"),
    CHANNELS_LAST: (4, "mpiexec"),
}
"""Key of ``equality.PLANS`` -> (number of ranks, launcher)."""


@dataclass(frozen=True)
class CheckPart:
    """One part of a check; it runs in processes of its own.

    Attributes:
        name: Unique name.
        body: Name of its function, see ``child.BODIES``.
        argument: Argument of the function.
        ranks: Number of processes.
        launcher: What starts the processes.
        weight: Share of the time relative to other parts, about its seconds on an H100.
        gpus: Number of GPUs that it needs.
        together: Whether it may run beside others, because it measures neither time nor memory.
        gpu_only: Whether its code does nothing without a GPU.
    """

    name: str
    body: str
    argument: str = ""
    ranks: int = 1
    launcher: Launcher = "none"
    weight: float = 1.0
    gpus: int = 1
    together: bool = False
    gpu_only: bool = False

    @property
    def file_name(self) -> str:
        """Name of the files of its output."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def command(self, options: list[str]) -> list[str]:
        """Return the command line that runs this part.

        Args:
            options: Options of the child program.

        Raises:
            RequestError: The part needs mpiexec, and there is none.
        """
        program = ["-m", "workflows.gpu_check.child", self.body, self.argument, *options]
        if self.launcher == "mpiexec":
            return [*find_mpiexec().command(self.ranks), sys.executable, *program]
        if self.launcher == "torchrun":
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
            return [sys.executable, *start, *program]
        return [sys.executable, *program]


def all_parts(sizes: CheckSizes) -> list[CheckPart]:
    """Return the parts of a check in their order; those that may run together come first.

    Args:
        sizes: Sizes of the check; speed and pieces have a part for each size of images.
    """
    # For parts that need one size only.
    first_px = sizes.speed_px[0]
    return [
        *(
            CheckPart(
                f"equal: {network}, {_ranks_text(n)}", "equal", network, n, launcher, weight=EQUAL_WEIGHT, together=True
            )
            for network in NETWORKS
            for n, launcher in RANKS
        ),
        *(
            CheckPart(
                f"equal: {name}", "equal", f"resnet18/{name}", ranks, launcher, weight=EQUAL_WEIGHT, together=True
            )
            for name, (ranks, launcher) in EQUAL_PLANS.items()
        ),
        *(
            CheckPart(
                f"equal: {network}, 2 GPUs", "equal", network, 2, "torchrun", weight=EQUAL_WEIGHT, gpus=2, together=True
            )
            for network in NETWORKS
        ),
        CheckPart("tests of GPUs", "tests", weight=30.0, gpu_only=True),
        CheckPart("commands", "commands", weight=60.0),
        *(CheckPart(f"speed: {side} px", "speed", str(side), weight=20.0) for side in sizes.speed_px),
        CheckPart("profile", "profile", str(first_px), weight=10.0),
        CheckPart("cells", "cells", weight=45.0),
        *(CheckPart(f"pieces: {side} px", "pieces", str(side), weight=20.0) for side in sizes.pieces_px),
        CheckPart("memory forecast", "memory", weight=15.0),
        CheckPart("staged messages", "staged", ranks=2, launcher="mpiexec", weight=15.0),
        CheckPart("feed", "feed", ranks=2, launcher="mpiexec", weight=20.0),
        CheckPart("largest image", "largest", "in core", weight=20.0),
        CheckPart("largest image by cells", "largest", "cells", weight=45.0),
        CheckPart("compiled in the background", "background", str(first_px), weight=60.0),
        CheckPart(f"compiled: {first_px} px", "compiled", str(first_px), weight=100.0),
        CheckPart("machine", "machine", weight=30.0),
    ]


def _ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
