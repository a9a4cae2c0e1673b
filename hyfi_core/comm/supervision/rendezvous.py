"""Waiting for the other ranks when a process starts: reported soon, ended by signals, and never longer than allowed.

::

    helper thread   ──── MPI_Init, or the store and connections of torch.distributed ────▶ joined
    main thread     polls: signals are handled │ after 10 s: who is waited for, and why │ HYFI_TIMEOUT_S: gives up

The calls block in C, without the interpreter's lock, and may never return: if nobody else comes, because the variables
of an earlier launcher were left in the shell, or because a process manager does not work.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hyfi_core.comm.supervision.time_limit import LIMIT_VARIABLE, seconds_of, time_limit_s
from hyfi_core.errors import RendezvousError

T = TypeVar("T")
NOTICE_VARIABLE = "HYFI_NOTICE_S"
"""After how many seconds a process says whom it waits for."""
NOTICE_S = 10.0
_POLL_S = 0.02
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "HYDI_", "HYDRA_")
_SLURM = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_SHOWN = 4


@dataclass(frozen=True)
class Expected:
    """The other ranks that a process's environment makes it wait for.

    Attributes:
        launcher: ``mpi``, ``slurm`` or ``torchrun``: what seems to have started the process.
        environment: Environment of the process.
    """

    launcher: str
    environment: Mapping[str, str]

    @property
    def variables(self) -> list[str]:
        """Names of the launcher's variables, those with a rank or a number of ranks first."""
        if self.launcher == "torchrun":
            of_torchrun = [name for name in _TORCHRUN if name in self.environment]
            return of_torchrun + sorted(name for name in self.environment if name.startswith("TORCHELASTIC_"))
        names = [name for name in self.environment if name.startswith(_PREFIXES)]
        if self.launcher == "slurm":
            names += [name for name in _SLURM if name in self.environment]
        return sorted(names, key=lambda name: (not name.endswith(("_SIZE", "_RANK", "_TASKS", "_PROCID")), name))

    @property
    def started(self) -> bool:
        """Whether a launcher has set the variables; without torchrun's run id, RANK and WORLD_SIZE prove nothing."""
        return self.launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in self.environment

    def check_numbers(self) -> None:
        """Check that torchrun's rank is below its number of ranks: otherwise all ranks would wait until the time limit.

        Raises:
            RendezvousError: It is not, or one of the two variables is not a number.
        """
        rank, size = self.environment.get("RANK", "0"), self.environment.get("WORLD_SIZE", "1")
        if self.launcher == "torchrun" and not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise RendezvousError(
                f"torch.distributed cannot start: RANK={rank} and WORLD_SIZE={size} in the environment; RANK must be a "
                f"number from 0 to WORLD_SIZE - 1. {self.advice()}"
            )

    def describe(self) -> str:
        """Return who is waited for, by which variables, as text."""
        *shown, last = [f"{name}={self.environment[name]}" for name in self.variables[:_SHOWN]] or ["variables"]
        subject = f"{', '.join(shown)} and {last}" if shown else last
        subject += " in the environment"
        says = "says" if len(self.variables) == 1 else "say"
        if self.launcher != "torchrun":
            return f"{subject} {says} that {self._starter} started this process as one of several ranks"
        rank, size = self.environment.get("RANK", "?"), self.environment.get("WORLD_SIZE", "?")
        where = f"{self.environment.get('MASTER_ADDR', '?')}:{self.environment.get('MASTER_PORT', '?')}"
        whom = f"the other ranks of {size} have not all come to" if rank == "0" else "rank 0 does not answer at"
        return f"{subject} {says} that this is rank {rank} of {size}, and {whom} {where}"

    def advice(self) -> str:
        """Return what to do, as text."""
        size = self.environment.get("WORLD_SIZE", "N")
        start = {"torchrun": f"torchrun --nproc-per-node {size} …", "slurm": "srun -n N …", "mpi": "mpiexec -n N …"}
        return f"{self.if_left_over()}. To start all ranks: `{start[self.launcher]}`"

    def if_left_over(self) -> str:
        """Return what to do if no launcher is there, as text."""
        name = Path(sys.argv[0]).name
        program = {"cli.py": "hyfi", "__main__.py": "hyfi", "-c": "python", "-m": "python", "": "python"}.get(
            name, name
        )
        unset = " ".join(f"-u {name}" for name in self.variables)
        return (
            f"If no launcher started it, the variables are left over from an earlier one: start it with `env {unset} "
            f"{program} …`"
        )

    @property
    def _starter(self) -> str:
        return {"mpi": "an MPI launcher", "slurm": "srun"}.get(self.launcher, self.launcher)


def notice_s() -> float:
    """Return after how many seconds a process says whom it waits for, from ``HYFI_NOTICE_S``.

    Raises:
        RequestError: The variable is not a number ≥ 0.
    """
    return seconds_of(NOTICE_VARIABLE, NOTICE_S)


def joined(start: Callable[[], T], expected: Expected, interrupted: Callable[[], bool] = lambda: False) -> T:
    """Return ``start()``, which blocks until all ranks have come.

    Args:
        start: Called on a helper thread; it must release the interpreter's lock while it waits.
        expected: What the environment says about the other ranks.
        interrupted: Whether a request to stop has been received and remembered. It ends the wait, but not within the
            first seconds under a launcher: there all ranks are about to come, and stop together afterwards.

    Raises:
        RendezvousError: Not all have come within ``HYFI_TIMEOUT_S``.
        KeyboardInterrupt: A request to stop was received.
        BaseException: Of ``start``.
    """
    limit_s, said_after_s = time_limit_s(), notice_s()
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(start())
        except BaseException as error:  # raised on the main thread
            errors.append(error)

    helper = threading.Thread(target=run, daemon=True, name="hyfi-rendezvous")
    begin_s, has_warned = time.monotonic(), False
    helper.start()
    while helper.is_alive():
        # Only for a moment: Python runs signal handlers in this thread, between two of its instructions.
        helper.join(_POLL_S)
        waited_s = time.monotonic() - begin_s
        if interrupted() and (has_warned or not expected.started):
            raise KeyboardInterrupt
        if not has_warned and waited_s >= said_after_s and helper.is_alive():
            has_warned = True
            _say(expected, waited_s, limit_s)
        if limit_s and waited_s >= limit_s and helper.is_alive():
            raise RendezvousError(
                f"waited {limit_s:g} s for the other ranks ({LIMIT_VARIABLE}): {expected.describe()}. "
                f"{expected.advice()}"
            )
    if errors:
        raise errors[0]
    return outcome[0]


def _say(expected: Expected, waited_s: float, limit_s: float) -> None:
    """Print that this process waits, for which ranks, and for how long it will wait."""
    until = f"for up to {limit_s:g} s ({LIMIT_VARIABLE})" if limit_s else "without a limit"
    line = (
        f"hyfi: {socket.gethostname()}, process {os.getpid()}: has been waiting for other ranks for {waited_s:.3g} s: "
        f"{expected.describe()}. {expected.advice()}. It will wait {until}; Ctrl-C or SIGTERM ends it\n"
    )
    # In one write: ``print`` writes the end of the line separately, and lines of several ranks would mix.
    sys.stderr.write(line)
    sys.stderr.flush()
