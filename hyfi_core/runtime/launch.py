"""The place of this process in the job: alone, or a rank that a launcher started."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from hyfi_core.plan.device import DeviceRequest, RankGpus, assign_devices, gpu_index

if TYPE_CHECKING:  # the launcher only asks where it stands; it needs no torch
    import torch

    from hyfi_core.comm.base import Communicator

# What Hydra (MPICH, Intel MPI), Open MPI and Slurm set for every rank they start.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")
# What Hydra and Open MPI set, and srun does not: where they are there, Slurm counts the managers, not the ranks.
_STARTED_BY_MPIEXEC = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE")


def inside_launcher() -> str | None:
    """Return what started this process as one of several ranks: ``mpi``, ``slurm``, ``torchrun``, or None."""
    if _is_only_task_of_slurm_step():
        return None
    if any(name in os.environ for name in _MPI_SIZES) or "PMIX_RANK" in os.environ:
        return "mpi"
    if "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return "torchrun"
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "slurm"
    return None


def _is_only_task_of_slurm_step() -> bool:
    """Whether ``srun`` started this process alone; it then has a place (``PMI_SIZE=1``) but is no rank of several."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if "SLURM_STEP_ID" in os.environ else None
    return tasks == "1" and not any(name in os.environ for name in (*_STARTED_BY_MPIEXEC, "TORCHELASTIC_RUN_ID"))


def _check_tasks(size: int) -> None:
    """Check that MPI has found the ranks that ``srun`` started.

    Raises:
        RequestError: it has not; each of them takes itself for the only one, and all would do the same work.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if "SLURM_STEP_ID" in os.environ else None
    if tasks is None or "SLURM_HET_SIZE" in os.environ or any(name in os.environ for name in _STARTED_BY_MPIEXEC):
        return
    if int(tasks) != size:
        raise RequestError(
            f"srun started {tasks} tasks, but MPI sees {size}. Start srun with the --mpi type of this MPI: "
            f"--mpi=pmi2 for MPICH and Intel MPI, --mpi=pmix for Open MPI (`srun --mpi=list` shows those of this Slurm)"
        )


def init(supervised: bool = True) -> Communicator:
    """Return this rank's communicator over all ranks of the job (collective).

    Started by ``mpiexec`` or ``srun`` it is MPI's world, by ``torchrun`` that of ``torch.distributed``; started by hand
    it is a group of one, and no MPI is needed.

    From then on a failure of one rank ends all: an exception in any of its threads, an exit while others wait for it,
    or a wait of more than ``HYFI_TIMEOUT_S`` seconds (1800; 0: no limit). The first error is printed once, with its
    rank, and the exit code is not zero.

    Where there are GPUs, the one of this rank's number on its node becomes PyTorch's current device.

    Args:
        supervised: whether it is so; a program whose launcher sees to failures turns it off.

    Raises:
        RequestError: a launcher started several ranks and no MPI can be loaded, ``HYFI_TIMEOUT_S`` is no number, or
            ``srun`` and MPI do not agree on how many ranks there are.
    """
    launcher = inside_launcher()
    if launcher is None:
        from hyfi_core.comm.alone import AloneCommunicator

        return AloneCommunicator()
    from hyfi_core.comm.supervision.supervisor import time_limit_s

    _select_gpu()
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
    everybody = world()
    _check_tasks(everybody.size)
    return _supervised(everybody) if supervised else everybody


def _select_gpu() -> None:
    """Make a GPU of this rank's own the current one, before anything allocates memory on another."""
    import torch

    index = gpu_index(os.environ, torch.cuda.device_count())
    if index is not None:
        torch.cuda.set_device(index)


def gpus_seen(comm: Communicator) -> list[RankGpus]:
    """Return the GPUs that each rank sees, on every rank (collective)."""
    import torch

    mine = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count()]
    return [RankGpus(*seen) for seen in comm.broadcast_object(comm.gather_objects(mine))]


def own_device(request: DeviceRequest, comm: Communicator) -> torch.device:
    """Return where this rank of a prediction or validation computes, and make it its own (collective).

    Args:
        request: ``cuda``: each rank on a GPU of its own; ``auto``: so where each has one, else all on the CPU.
        comm: the ranks that compute.

    Raises:
        RequestError: on all ranks: GPUs are asked for, and a node has too few.
    """
    return made_current(assign_devices(request, gpus_seen(comm), "--device ", "rank")[comm.rank])


def made_current(name: str) -> torch.device:
    """Return a device by its name; a GPU becomes this process's own, before anything allocates on another."""
    import torch

    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _supervised(comm: Communicator, store: Any = None) -> Communicator:
    if comm.size > 1:
        from hyfi_core.comm.supervision.supervisor import supervise

        supervise(comm, store)
    return comm
