"""The role of this process in the job: a single process, or a rank started by a launcher."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RendezvousError, RequestError

if TYPE_CHECKING:  # every command imports this module before anything else: without torch and plans
    import torch

    from hyfi_core.comm.base import Communicator
    from hyfi_core.comm.supervision.rendezvous import Expected
    from hyfi_core.plan.device import DeviceRequest, RankGpus

# Variables that Hydra (MPICH, Intel MPI), Open MPI and Slurm set for every rank.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")
# Set by Hydra and Open MPI, but not by srun: with them, Slurm counts process managers, not ranks.
_STARTED_BY_MPIEXEC = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE")
# Programs and modules in the command lines of processes that start ranks.
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "torch/distributed/run.py")
_MPI_LAUNCHERS = {
    "hydra_pmi_proxy",
    "pmi_proxy",
    "mpiexec",
    "mpirun",
    "orterun",
    "orted",
    "prterun",
    "prted",
    "slurmstepd",
}


def inside_launcher() -> str | None:
    """Return what started this process as one of several ranks: ``mpi``, ``slurm``, ``torchrun``, or None."""
    if _is_only_task_of_slurm_step():
        return None
    of_mpi = any(name in os.environ for name in _MPI_SIZES) or "PMIX_RANK" in os.environ
    if of_mpi and not ("TORCHELASTIC_RUN_ID" in os.environ and _nearest_is_torchrun()):
        return "mpi"
    if "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return "torchrun"
    if "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "slurm"
    return None


@cache  # ancestors stay the same, and commands ask again and again
def _nearest_is_torchrun() -> bool:
    """Whether torchrun is a nearer ancestor of this process than any launcher of MPI.

    The environment has variables of both in ``srun torchrun …``, or in a shell that another launcher has started. The
    nearer launcher has started this process.
    """
    pid = os.getppid()
    with suppress(OSError, ValueError):  # without /proc, or at a process of another user that has ended
        while pid > 1:
            folder = Path("/proc") / str(pid)
            command = (folder / "cmdline").read_text("utf-8", "replace").rstrip("\0").split("\0")
            if any(word.endswith(_TORCHRUN) for word in command):
                return True
            if any(_program(word) in _MPI_LAUNCHERS for word in command):
                return False
            # The parent's id comes after the program's name, which is in parentheses and may contain some itself.
            pid = int((folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    return False


def _program(word: str) -> str:
    """Return the name of a program from a path, without an ending: ``mpiexec`` for ``/usr/bin/mpiexec.hydra``."""
    # ``slurmstepd: [123.0]`` is the title of Slurm's process.
    return re.split("[.:]", word.rpartition("/")[2])[0]


def _is_only_task_of_slurm_step() -> bool:
    """Whether ``srun`` started only this process, which then has ``PMI_SIZE=1`` but is not one of several ranks."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if "SLURM_STEP_ID" in os.environ else None
    return tasks == "1" and not any(name in os.environ for name in (*_STARTED_BY_MPIEXEC, "TORCHELASTIC_RUN_ID"))


def _check_tasks(size: int, expected: Expected) -> None:
    """Check that MPI has as many ranks as the launcher's variables say.

    Raises:
        RendezvousError: it has fewer or more; without an error, each rank would do the whole work.
        RequestError: it has fewer or more than srun started tasks; all tasks run, so their rank 0 reports it.
    """
    # Heterogeneous jobs are not checked, here and below: their variables may count the ranks of one component.
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        stated = os.environ.get(name, "")
        if stated.isdigit() and int(stated) != size and "SLURM_HET_SIZE" not in os.environ:
            raise RendezvousError(
                f"{expected.describe()}, but MPI sees {size} rank{'s' * (size > 1)}, not {stated} ({name}): no "
                f"launcher of this process's MPI has started it. {expected.advice()}, with the mpiexec of the same MPI"
            )
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if "SLURM_STEP_ID" in os.environ else None
    if tasks is None or "SLURM_HET_SIZE" in os.environ or any(name in os.environ for name in _STARTED_BY_MPIEXEC):
        return
    if int(tasks) != size:
        raise RequestError(
            f"srun started {tasks} tasks, but MPI sees {size}. Start srun with the --mpi type of this MPI: "
            f"--mpi=pmi2 for MPICH and Intel MPI, --mpi=pmix for Open MPI (`srun --mpi=list` shows those of this "
            f"Slurm). {expected.if_left_over()}"
        )


def init(supervised: bool = True, interrupted: Callable[[], bool] = lambda: False) -> Communicator:
    """Return this rank's communicator over all ranks of the job (collective).

    Started by ``mpiexec`` or ``srun`` it is MPI's world, by ``torchrun`` that of ``torch.distributed``; otherwise it is
    a group of one rank, without MPI.

    After this call, a failure of one rank stops all: an uncaught exception in any thread, an exit while others wait for
    it, or a wait of more than ``HYFI_TIMEOUT_S`` seconds (1800; 0: no limit). The first error is printed once, with its
    rank, and the exit code is not zero.

    If the other ranks have not come within ten seconds (``HYFI_NOTICE_S``), a notice says which ranks are missing and
    by which environment variables they are expected; ``HYFI_TIMEOUT_S`` is the limit. Signals are handled meanwhile.

    With GPUs, the GPU with the number of this rank on its node becomes PyTorch's current device.

    Args:
        supervised: False for programs whose launcher handles failures.
        interrupted: whether a request to stop has been received, for programs that only remember signals; it ends the
            wait for other ranks with a KeyboardInterrupt.

    Raises:
        RequestError: ``HYFI_TIMEOUT_S`` or ``HYFI_NOTICE_S`` is not a number, the launcher is that of another MPI, or
            ``/dev/shm`` has too little room for MPICH.
        RendezvousError: a RequestError: a launcher started several ranks and no MPI can be loaded, the launcher's and
            MPI's number of ranks differ, or the other ranks have not come.
    """
    launcher = inside_launcher()
    if launcher is None:
        from hyfi_core.comm.alone import AloneCommunicator

        return AloneCommunicator()
    from hyfi_core.comm.supervision.library_match import check_library
    from hyfi_core.comm.supervision.rendezvous import Expected
    from hyfi_core.comm.supervision.shared_memory import check_shared_memory, ranks_here
    from hyfi_core.comm.supervision.time_limit import time_limit_s

    expected = Expected(launcher, os.environ)
    expected.check_numbers()
    _select_gpu(launcher)
    if launcher == "torchrun":
        from hyfi_core.comm import torchdist

        job_comm: Communicator = torchdist.world(_library_limit_s(time_limit_s()), expected, interrupted)
        return _supervised(job_comm, torchdist.board_store()) if supervised else job_comm
    try:
        from hyfi_core.comm.mpi import MPI, world
    except (ImportError, RuntimeError) as error:
        raise RendezvousError(
            f"{launcher} started this rank, but no MPI library can be loaded ({error}); "
            "install one with `pip install 'hyfi[local]'` or load the cluster's MPI module"
        ) from error
    # Both checks before MPI starts, since MPI would abort, or end by a signal, without a message that helps.
    check_library(MPI.Get_library_version(), os.environ)
    ranks = ranks_here(os.environ) if MPI.get_vendor()[0] == "MPICH" else None
    if ranks is not None:
        check_shared_memory(ranks, os.environ)
    comm = world(expected, interrupted)
    _check_tasks(comm.size, expected)
    return _supervised(comm) if supervised else comm


def _library_limit_s(limit_s: float) -> float:
    """Return the seconds after which torch.distributed ends a wait: later than supervision would, with ``limit_s``."""
    # Without a limit of supervision (0) 30 days: 0 would mean the default of torch.distributed, which is minutes.
    return 2 * limit_s + 60 if limit_s else 30 * 24 * 3600.0


def _select_gpu(launcher: str) -> None:
    """Make this rank's GPU the current device, before any allocation."""
    import torch

    from hyfi_core.plan.device import gpu_index

    index = gpu_index(os.environ, launcher == "torchrun", torch.cuda.device_count())
    if index is not None:
        torch.cuda.set_device(index)


def gpus_seen(comm: Communicator) -> list[RankGpus]:
    """Return the GPUs visible to each rank, on every rank (collective)."""
    import torch

    from hyfi_core.plan.device import RankGpus

    mine = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count()]
    return [RankGpus(*gpus) for gpus in comm.broadcast_object(comm.gather_objects(mine))]


def own_device(request: DeviceRequest, comm: Communicator) -> torch.device:
    """Return this rank's device for prediction or validation, and make it current (collective).

    Args:
        request: ``cuda``: one GPU for each rank; ``auto``: GPUs if there are enough, else the CPU.
        comm: the ranks that compute.

    Raises:
        RequestError: on all ranks: GPUs are requested and a node has too few.
    """
    from hyfi_core.plan.device import assign_devices

    return made_current(assign_devices(request, gpus_seen(comm), "--device ", "rank")[comm.rank])


def made_current(name: str) -> torch.device:
    """Return a device by name; a GPU becomes the current device."""
    import torch

    from hyfi_core.current_device import make_current

    device = torch.device(name)
    make_current(device)
    return device


def _supervised(comm: Communicator, store: Any = None) -> Communicator:
    if comm.size > 1:
        from hyfi_core.comm.supervision.supervisor import supervise

        supervise(comm, store)
    return comm
