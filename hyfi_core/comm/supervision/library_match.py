"""Whether the launcher speaks the protocol of this process's MPI library, known before the library starts.

::

    launcher             sets                        MPICH, Intel MPI          Open MPI
    Hydra's mpiexec      PMI_FD or PMI_PORT          yes                       no
    srun --mpi=pmi2      PMI_FD, SLURM_STEP_ID       yes                       before 5, if built with it
    Open MPI's mpiexec   PMIX_RANK, OMPI_…           if built with PMIx        yes
    srun --mpi=pmix      PMIX_RANK, SLURM_STEP_ID    if built with PMIx        yes

With the wrong launcher, a library aborts with its own messages, or every rank takes itself for the only one. Variables
alone prove nothing, because they may be left over from an earlier launcher: it must also answer.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hyfi_core.comm.supervision.rendezvous import Expected
from hyfi_core.errors import RendezvousError, RequestError

_ANSWER_S = 0.5
_LOADED = Path("/proc/self/maps")


def check_library(version: str, environment: Mapping[str, str]) -> None:
    """Check that the launcher of this process can start its MPI library; the result is the same on all ranks.

    Args:
        version: ``MPI_Get_library_version``.
        environment: Environment of the process.

    Raises:
        RequestError: It cannot; the message has the line to use.
        RendezvousError: A RequestError: no launcher is there.
    """
    _refuse_closed_connection(version, environment)
    is_open_mpi = "Open MPI" in version
    if is_open_mpi:
        # A launcher counts only if it answers: one shell may have the variables of several launchers.
        wrong = _speaks_pmi(environment) and not _speaks_pmix(environment) and not _has_pmi(version)
    else:  # MPICH and libraries derived from it; nothing is known about others, which are not refused
        is_mpich = version.startswith(("MPICH", "Intel"))
        wrong = (
            is_mpich and "pmix" not in version.lower() and _speaks_pmix(environment) and not _speaks_pmi(environment)
        )
    if not wrong:
        return
    library = " ".join(re.split(r"[,\n]", version)[0].replace("Version:", "").split())
    # In a Slurm job, mpiexec may start its process managers by srun, and its ranks inherit SLURM_STEP_ID. Open MPI's
    # mpiexec sets the second of these variables, Hydra's the third, srun neither.
    slurm = "SLURM_STEP_ID" in environment and "OMPI_COMM_WORLD_SIZE" not in environment
    slurm &= "MPI_LOCALNRANKS" not in environment
    if slurm:
        used, use = ("pmi2", "pmix") if is_open_mpi else ("pmix", "pmi2")
        raise RequestError(
            f"srun started this rank with --mpi={used}, but its MPI library is {library}, which does not speak it: use "
            f"`srun --mpi={use} …` (`srun --mpi=list` shows the types of this Slurm)"
        )
    used = "MPICH (Hydra)" if is_open_mpi else "Open MPI"
    raise RequestError(
        f"the mpiexec of {used} started this rank, but its MPI library is {library}: use `{_own_mpiexec(is_open_mpi)} "
        f"-n {_size(environment)} …`, or an mpi4py that loads the MPI of that mpiexec"
    )


def _refuse_closed_connection(version: str, environment: Mapping[str, str]) -> None:
    """Refuse variables of an earlier launcher whose connection this process does not have: MPICH would abort."""
    # PMI_FD is a connection that the launcher has opened; it may be closed by now. PMI_PORT is an address to call.
    if "Open MPI" in version or "PMI_PORT" in environment:
        return
    # PMIx: without an address of its server no process can connect.
    without_server = "PMIX_RANK" in environment and not any(name.startswith("PMIX_SERVER_URI") for name in environment)
    if "PMI_FD" not in environment and not without_server:
        return
    if not _speaks_pmi(environment) and not _speaks_pmix(environment):
        expected = Expected("mpi", environment)
        raise RendezvousError(f"{expected.describe()}, but its connection is closed. {expected.if_left_over()}")


def _speaks_pmi(environment: Mapping[str, str]) -> bool:
    """Whether a launcher of MPICH's protocol holds this process's connection."""
    if "PMI_RANK" not in environment:
        return False
    if "PMI_PORT" in environment:
        return _answers(environment["PMI_PORT"])
    with suppress(OSError, ValueError):
        # The file descriptor is inherited; if the variable is left over, it is closed by now, or another file.
        return stat.S_ISSOCK(os.fstat(int(environment.get("PMI_FD", ""))).st_mode)
    return False


def _speaks_pmix(environment: Mapping[str, str]) -> bool:
    """Whether a server of PMIx answers to this process."""
    names = [name for name in environment if name.startswith("PMIX_SERVER_URI")]
    return "PMIX_RANK" in environment and any(_answers(environment[name]) for name in names)


def _answers(address: str) -> bool:
    """Whether a process accepts connections at an address ``host:port``."""
    match = re.search(r"([^/;\s\[\]]+):(\d+)$", address.strip())
    if match is None:
        return False
    with suppress(OSError), socket.create_connection((match[1], int(match[2])), timeout=_ANSWER_S):
        return True
    return False


def _has_pmi(version: str) -> bool:
    """Whether Open MPI was built for Slurm's PMI, which version 5 has dropped."""
    match = re.search(r"v(\d+)", version)
    if match is None or int(match[1]) >= 5:
        return False
    return any(any(folder.glob("openmpi*/**/mca_pmix_s[12].so")) for folder in _library_folders())


def _library_folders() -> list[Path]:
    """Return the folders of the MPI libraries that this process has loaded."""
    with suppress(OSError):
        loaded = re.findall(r"/.*/libmpi\.so\S*", _LOADED.read_text(encoding="utf-8", errors="replace"))
        return sorted({Path(name).parent for name in loaded})
    return []


def _own_mpiexec(is_open_mpi: bool) -> str:
    """Return the mpiexec of the loaded library: in ``bin`` beside its ``lib``, or by Debian's name."""
    for folder in _library_folders():
        if os.access(beside := folder.parent / "bin" / "mpiexec", os.X_OK):
            return str(beside)
    return "mpiexec.openmpi" if is_open_mpi else "mpiexec.mpich"


def _size(environment: Mapping[str, str]) -> str:
    return environment.get("PMI_SIZE") or environment.get("OMPI_COMM_WORLD_SIZE") or "N"
