"""Where this process stands in the job: alone, or a rank that a launcher started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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


def init() -> Communicator:
    """Return this rank's communicator over all ranks of the job.

    Started by ``mpiexec`` or ``srun`` it is MPI's world, by ``torchrun`` that of ``torch.distributed``; started by hand
    it is a group of one, and no MPI is needed.

    Raises:
        RequestError: a launcher started several ranks and no MPI can be loaded.
    """
    launcher = inside_launcher()
    if launcher is None:
        from hyfi_core.comm.alone import AloneCommunicator

        return AloneCommunicator()
    if launcher == "torchrun":
        from hyfi_core.comm.torchdist import world as torch_world

        return torch_world()
    try:
        from hyfi_core.comm.mpi import world
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"{launcher} started this rank, but no MPI library can be loaded ({error}); "
            "install one with `pip install 'hyfi[local]'` or load the cluster's MPI module"
        ) from error
    return world()
