"""The parts of a check, in their order."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from workflows.launch.mpiexec import find

NETWORKS = ("resnet18", "amoebanet", "third party")


@dataclass(frozen=True)
class CheckPart:
    """One part of a check; it runs in processes of its own.

    Attributes:
        name: unique.
        body: name of its function, see ``child.BODIES``.
        argument: of the function.
        ranks: number of processes.
        launcher: what starts them.
        weight: share of the time, relative to other parts.
        gpus: GPUs that it needs.
    """

    name: str
    body: str
    argument: str = ""
    ranks: int = 1
    launcher: Literal["none", "mpiexec", "torchrun"] = "none"
    weight: float = 1.0
    gpus: int = 1

    def command(self, options: list[str]) -> list[str]:
        """Return the command line that runs this part.

        Args:
            options: of the child program.

        Raises:
            RequestError: it needs mpiexec, and there is none.
        """
        program = ["-m", "workflows.gpu_check.child", self.body, self.argument, *options]
        if self.launcher == "mpiexec":
            return [*find().command(self.ranks), sys.executable, *program]
        if self.launcher == "torchrun":
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
            return [sys.executable, *start, *program]
        return [sys.executable, *program]


def all_parts(sides_px: tuple[int, ...]) -> list[CheckPart]:
    """Return all parts.

    Args:
        sides_px: sides of the images of timed steps.
    """
    return [
        *(CheckPart(f"equal: {network}, 1 rank", "equal", network) for network in NETWORKS),
        *(CheckPart(f"equal: {network}, 2 ranks", "equal", network, 2, "mpiexec") for network in NETWORKS),
        *(CheckPart(f"equal: {network}, 4 ranks", "equal", network, 4, "mpiexec") for network in NETWORKS),
        *(CheckPart(f"equal: {network}, 2 GPUs", "equal", network, 2, "torchrun", gpus=2) for network in NETWORKS),
        CheckPart("tests of GPUs", "tests"),
        *(CheckPart(f"speed: {side} px", "speed", str(side), weight=1.5) for side in sides_px),
        CheckPart("staged messages", "staged", ranks=2, launcher="mpiexec"),
        CheckPart("feed", "feed", ranks=2, launcher="mpiexec"),
        CheckPart("cells", "cells", weight=1.5),
        CheckPart("largest image", "largest", "in core", weight=1.5),
        CheckPart("largest image by cells", "largest", "cells", weight=2.0),
        CheckPart("memory forecast", "memory"),
        CheckPart("machine", "machine", weight=2.0),
    ]
