"""Threads of ranks that share the cores of a node."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from data.cores import ranks_with_these_cores, usable_cores
from workflows.console import say

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator


def set_threads(world: Communicator, threads: int | None = None) -> None:
    """Set the number of threads with which this rank computes (collective).

    Without a number from the user, ranks that may use the same cores divide them: under a launcher that binds no cores,
    such as ``mpiexec``, each would use all. The number is printed once, because rounding depends on it.

    Args:
        world: All ranks of the command.
        threads: Number from the configuration; None if it has none, then ``OMP_NUM_THREADS`` counts.
    """
    import torch

    # Collective, so it is called whatever the configuration says.
    sharing = ranks_with_these_cores(world)
    if threads is None and sharing > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = usable_cores()
        threads = max(1, cores // sharing)
        if world.rank == 0:
            say(
                f"{sharing} ranks share {cores} core{'s' * (cores > 1)} of {socket.gethostname()}: {threads} "
                f"thread{'s' * (threads > 1)} each (OMP_NUM_THREADS sets another number)"
            )
    if threads is not None:
        torch.set_num_threads(threads)
