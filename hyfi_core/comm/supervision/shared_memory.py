"""Room in ``/dev/shm``, by which MPICH's ranks of a node exchange messages.

MPICH maps a file there without checking that there is room: on a full file system, writing to it ends the rank with
signal 7. Open MPI and UCX use other memory if there is no room.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hyfi_core.errors import RequestError
from hyfi_core.size_text import size_text

FOLDER = Path("/dev/shm")
_CELLS, CELLS_VARIABLE = 64, "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS"
_CELL_SIZE_VARIABLE = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_CELL_SIZE"
_CELL_BYTES = 16_521
"""Size of a cell of 16 KiB with its header, measured with MPICH 5.0.2 on 1 to 8 ranks."""
_START_S = 60.0
_NAMED = 3


def ranks_here(environment: Mapping[str, str]) -> int | None:
    """Return the least number of ranks on this process's node, from its launcher's variables; None if unknown."""
    if "MPI_LOCALNRANKS" in environment:
        return int(environment["MPI_LOCALNRANKS"])
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")  # "2", "2(x3)", "4,2"
    counts = [int(count) for group in tasks.split(",") for count in re.findall(r"^\d+", group)]
    return min(counts, default=None)


def check_shared_memory(ranks: int, environment: Mapping[str, str], folder: Path = FOLDER) -> None:
    """Check that ``folder`` has room for the ranks of this node; other ranks may be starting meanwhile.

    Args:
        ranks: Ranks of the node, all with MPICH.
        environment: Environment of the ranks.
        folder: Folder in which MPICH creates its file.

    Raises:
        RequestError: There is not enough room.
    """
    cells = environment.get(CELLS_VARIABLE, str(_CELLS))
    if ranks < 2 or _CELL_SIZE_VARIABLE in environment or not cells.isdigit() or not folder.is_dir():
        return
    needed_bytes, room = ranks * int(cells) * _CELL_BYTES, describe_room(folder)
    if _free_bytes(folder) + _starting_bytes(folder) >= needed_bytes:
        return
    raise RequestError(
        f"{room}, but the {ranks} ranks of this node need {size_text(needed_bytes)} there to exchange messages "
        f"(MPICH): {advice(folder)}, or let MPICH take less ({CELLS_VARIABLE}=8)"
    )


def advice(folder: Path = FOLDER) -> str:
    """Return how to get more room in ``folder``."""
    return f"free some, or make it larger (mount -o remount,size=1g {folder}; of a container: docker run --shm-size=1g)"


def describe_room(folder: Path = FOLDER) -> str:
    """Return how much room ``folder`` has, and its largest files."""
    disk = os.statvfs(folder)
    sizes = sorted(((size, path.name) for path, size in _allocated(folder)), reverse=True)[:_NAMED]
    files = ", ".join(f"{name} {size_text(size)}" for size, name in sizes if size)
    return (
        f"{folder} has {size_text(_free_bytes(folder))} free of {size_text(disk.f_blocks * disk.f_frsize)}"
        f"{f' (in it: {files})' if files else ''}"
    )


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _starting_bytes(folder: Path) -> int:
    """Return how many bytes ranks have taken that started within the last minute: perhaps those of this job."""
    began_s = time.time() - _START_S
    starting = 0
    for path, size in _allocated(folder):
        with suppress(OSError):
            starting += size * (path.name.startswith("mpich_shm_") and path.stat().st_mtime > began_s)
    return starting


def _allocated(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of a folder of shared memory, with the bytes of memory that each takes."""
    files = []
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                # Not the file's length, because files of tmpfs have holes; blocks are 512 bytes on every file system.
                files.append((path, path.stat().st_blocks * 512))
    return files
