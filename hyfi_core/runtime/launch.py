"""Where this process stands in the job: alone, or a rank that a launcher started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError

if TYPE_CHECKING:  # the launcher only asks where it stands; it needs no torch
    from hyfi_core.comm.base import Communicator

# What Hydra (MPICH, Intel MPI), Open MPI and Slurm set for every rank they start.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")


def inside_launcher() -> str | None:
    """Return what started this process as one of several ranks: ``mpi``, ``slurm``, ``torchrun``, or None."""
    if any(name in os.environ for name in _MPI_SIZES) or "PMIX_RANK" in os.environ:
        return "mpi"
    if "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return "torchrun"
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "slurm"
    return None


def init(supervised: bool = True) -> Communicator:
    """Return this rank's communicator over all ranks of the job (collective).

    Started by ``mpiexec`` or ``srun`` it is MPI's world, by ``torchrun`` that of ``torch.distributed``; started by hand
    it is a group of one, and no MPI is needed.

    From then on a failure of one rank ends all: an exception in any of its threads, an exit while others wait for it,
    or a wait of more than ``HYFI_TIMEOUT_S`` seconds (1800; 0: no limit). The first error is printed once, with its
    rank, and the exit code is not zero.

    Args:
        supervised: whether it is so; a program whose launcher sees to failures turns it off.

    Raises:
        RequestError: a launcher started several ranks and no MPI can be loaded, or ``HYFI_TIMEOUT_S`` is no number.
    """
    launcher = inside_launcher()
    if launcher is None:
        from hyfi_core.comm.alone import AloneCommunicator

        return AloneCommunicator()
    from hyfi_core.comm.supervision import time_limit_s

    if launcher == "torchrun":
        from hyfi_core.comm import torchdist

        found: Communicator = torchdist.world(2 * time_limit_s())
        return _supervised(found, torchdist.board_store()) if supervised else found
    try:
        from hyfi_core.comm.mpi import world
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"{launcher} started this rank, but no MPI library can be loaded ({error}); "
            "install one with `pip install 'hyfi[local]'` or load the cluster's MPI module"
        ) from error
    return _supervised(world()) if supervised else world()


def _supervised(comm: Communicator, store: Any = None) -> Communicator:
    if comm.size > 1:
        from hyfi_core.comm.supervision import supervise

        supervise(comm, store)
    return comm
