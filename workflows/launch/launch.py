"""Starts a command on several ranks, and makes sure that all of them end, whatever happens.

    hyfi train …                        the launcher: the process that the user started
      └─ mpiexec -n 4                   in its own session, ends with the launcher
           └─ (process manager)
                ├─ python -m workflows.cli train …     rank 0
                ├─ …                                   ranks 1–3: run_as_rank(body)

Ranks write their exit codes to files (see :mod:`workflows.launch.status`), and exit with 0: a process manager would
kill all others when the first rank exits with another code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from data.children import die_with_parent
from data.cores import usable_cores
from hyfi_core.comm.supervision.rendezvous import notice_s
from hyfi_core.comm.supervision.shared_memory import advice as advice_on_room
from hyfi_core.comm.supervision.shared_memory import check_shared_memory, describe_room
from hyfi_core.comm.supervision.time_limit import LIMIT_VARIABLE, time_limit_s
from hyfi_core.errors import RendezvousError, RequestError
from hyfi_core.job_limits import SLURM_LIMITS
from hyfi_core.runtime.launch import inside_launcher
from workflows import signals
from workflows.console import warn
from workflows.exit_codes import FAULT, STOPPED, WRONG_REQUEST
from workflows.interruption import RunInterruptedError
from workflows.launch import at_failure, mpiexec, peer_watch, rank_log
from workflows.launch.own_folder import own_folder
from workflows.launch.owner import JOB_VARIABLE
from workflows.launch.processes import ExitOrder, kill_session
from workflows.launch.status import STATUS_VARIABLE, RunStatus, leave_exit_code
from workflows.out_of_memory import GENERAL_ADVICE, kernel_kills, message_of

__all__ = ["inside_launcher", "launch", "launch_program", "own_rank", "run_as_rank"]

# Huge pages for large tensors: the same memory with fewer page faults (benchmarks/LOG.md).
RANK_SETTINGS = {"THP_MEM_ALLOC_ENABLE": "1"}
SECONDS_TO_END_AFTER_FAILURE = 5.0
POLL_SECONDS = 0.05
FAILED = "hyfi: rank {rank} failed, all ranks stop:\n{error}"


def own_rank() -> int:
    """Return this process's rank from the environment; 0 without a launcher, or if the environment says no number."""
    launcher = inside_launcher()
    if launcher is None:
        return 0
    # Under torchrun only its RANK: other variables belong to a launcher around it, or are left over. Otherwise PMI's
    # before Slurm's: in a job script, mpiexec's ranks all inherit the script's SLURM_PROCID.
    of_mpi = () if launcher == "torchrun" else ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
    stated = next((os.environ[name] for name in (*of_mpi, "RANK") if name in os.environ), "0")
    return int(stated) if stated.isdecimal() else 0


def launch(argv: Sequence[str], ranks: int, run: Path | None = None) -> int:
    """Run ``hyfi argv…`` in ``ranks`` processes on this node and return the exit code of the job.

    SIGTERM, SIGINT and SIGUSR1 are forwarded to every rank as SIGUSR1, a request to save and stop; a second signal
    kills the ranks.

    Args:
        argv: Arguments of ``hyfi``.
        ranks: Number of processes.
        run: Folder of a run; the death of a rank is written to the rank's log there.

    Returns:
        0 to 3, the exit code of the ranks; 70 if one of them failed (its error was printed) or was killed.

    Raises:
        RequestError: There is no MPI, or this is one of several nodes of a job.
    """
    mpiexec.refuse_several_nodes(argv[0], ranks)
    return launch_program([sys.executable, "-m", "workflows.cli", *argv], ranks, run)


def launch_body(body: Callable[[], int], command: str, ranks: int) -> int:
    """Like :func:`launch`, but each process calls ``body`` by :func:`run_as_rank`, and parses no command line.

    Args:
        body: A function that can be pickled, such as a partial of a module's function with frozen values.
        command: The command of ``hyfi``, for messages.
        ranks: Number of processes.
    """
    mpiexec.refuse_several_nodes(command, ranks)
    return launch_program([sys.executable, "-m", "workflows.cli", "rank", command], ranks, body=body)


def launch_program(
    program: Sequence[str], ranks: int, run: Path | None = None, body: Callable[[], int] | None = None
) -> int:
    """Like :func:`launch`, for any program whose ranks call :func:`run_as_rank`; return the exit code.

    Args:
        program: The command line of a rank.
        ranks: Number of ranks.
        run: The run's folder, if there is one.
        body: What each rank runs; pickled for it. None: the program itself knows.
    """
    starter = mpiexec.find_mpiexec()
    time_limit_s(), notice_s()  # both raise if their variables are wrong: now, before anything is started
    if starter.flavour.startswith("MPICH"):
        check_shared_memory(ranks, os.environ)
    with own_folder() as folder:
        status = RunStatus(folder)
        if body is not None:
            status.leave_body(body)
        process = subprocess.Popen(
            [*starter.command(ranks), *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(ranks) | {STATUS_VARIABLE: str(folder)},
            # In a session of its own, Ctrl-C on the terminal reaches only this process, which forwards it, and
            # `kill_session` finds everything that the ranks have started.
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
        )
        return _LaunchMonitor(process, status, ranks, run).wait_for_all()


def _environment(ranks: int) -> dict[str, str]:
    """Return the ranks' environment; cores are divided among them, unless the user has set ``OMP_NUM_THREADS``.

    Slurm's variables are removed: with them, the process manager would start the ranks through ``srun``, and a rank
    would take itself for a Slurm task. The variables with limits of memory stay; the job's number gets another name.
    """
    removed = [name for name in os.environ if name.startswith(("SLURM_", "PMI_", "PMIX_")) and name not in SLURM_LIMITS]
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    if "SLURM_JOB_ID" in os.environ:
        inherited[JOB_VARIABLE] = os.environ["SLURM_JOB_ID"]
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))} | RANK_SETTINGS | mpiexec.ON_THIS_NODE | inherited


class _LaunchMonitor:
    """Supervises one mpiexec: forwards signals and output, and determines the exit code."""

    def __init__(self, process: subprocess.Popen[bytes], status: RunStatus, ranks: int, run: Path | None) -> None:
        self._process, self._status, self._ranks, self._run = process, status, ranks, run
        self._stops = 0
        self._begin_s, self._told_of_wait, self._given_up = time.monotonic(), False, False
        self._exits = ExitOrder()
        self._kills_before = kernel_kills()

    def wait_for_all(self) -> int:
        """Wait until all ranks have ended and return the exit code of the job."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = {number: signal.signal(number, self._stop) for number in numbers}
        output = mpiexec.Output(self._process)
        try:
            self._wait()
        finally:
            # mpiexec has ended, but perhaps not what the ranks have started.
            kill_session(self._process.pid)
            output.finish()
            self._exits.close()
            # Only now: a second request must still kill what hangs above.
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._code(output)

    def _wait(self) -> None:
        """Wait until the launcher has ended; kill what remains some seconds after a failure."""
        failed_s: float | None = None
        while self._process.poll() is None:
            started = self._status.pids()
            # Wakes as soon as a rank ends, not a poll later: the message names the rank that ended first.
            if started:
                self._exits.wait(started.values(), POLL_SECONDS)
            else:
                time.sleep(POLL_SECONDS)
                self._check_start()
            # A failed rank ends the others by itself; what is still there seconds later hangs, and is killed.
            if failed_s is None and (self._status.failed or self._first_lost() is not None):
                failed_s = time.monotonic()
            if failed_s is not None and time.monotonic() - failed_s > SECONDS_TO_END_AFTER_FAILURE:
                kill_session(self._process.pid)

    def _check_start(self) -> None:
        """While no rank has begun: end on a request to stop, report the wait once, and end at the time limit."""
        if self._status.pids():  # ranks have begun meanwhile; a request to stop is theirs, because they save first
            return
        waited_s, limit_s = time.monotonic() - self._begin_s, time_limit_s()
        late = bool(limit_s) and waited_s >= limit_s
        if waited_s >= notice_s() and not self._told_of_wait:
            self._told_of_wait = True
            warn(f"hyfi: no rank has begun after {waited_s:.3g} s; waiting for {self._starter_text()}")
        if late:
            warn(f"hyfi: no rank has begun within {limit_s:g} s ({LIMIT_VARIABLE}); all are stopped", "ERROR")
        is_requested = self._stops > 0
        if late or is_requested:
            # A run stopped on request is no failure; one without ranks at the time limit is.
            self._given_up = is_requested
            kill_session(self._process.pid)

    def _starter_text(self) -> str:
        command = self._process.args if isinstance(self._process.args, list) else []
        starter = " ".join(str(word) for word in command[:3])
        return f"`{starter} …`, process {self._process.pid}; try `{starter} hostname`, which must end at once"

    def _first_lost(self) -> int | None:
        """Return the first rank that ended without writing its exit code, or None."""
        if not self._exits.pids:
            return None
        codes, ranks = self._status.codes(), {pid: rank for rank, pid in self._status.pids().items()}
        return next((ranks[pid] for pid in self._exits.pids if pid in ranks and ranks[pid] not in codes), None)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one requests all ranks to save and stop, the second one kills them."""
        self._stops += 1
        if self._stops > 1:
            kill_session(self._process.pid)
            return
        if number == signal.SIGINT:
            warn("hyfi: saving and stopping; press Ctrl-C again to stop at once")
        # Directly to the ranks: process managers differ in which signals they forward, and in how long they wait.
        self._status.request_stop()
        for pid in self._status.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def _code(self, output: mpiexec.Output) -> int:
        """Return the exit code of the run, from those of its ranks and of the launcher."""
        if self._status.failed:
            failure = self._status.failure() or {"rank": "?", "error": "it was killed before it could report the error"}
            warn(FAILED.format(**failure))
            return FAULT
        codes = self._status.codes()
        # The largest code counts: when a stop is requested, ranks that are done return 0, the others 3.
        if len(codes) == self._ranks and self._process.returncode == 0:
            return max(codes.values())
        if self._given_up:
            warn("hyfi: stopped on request before any rank had begun; nothing was written")
            return STOPPED
        if self._stops > 1:
            warn("hyfi: stopped at once, by a second request; what was not saved is lost")
            return FAULT
        if self._stops and len(codes) == self._ranks and set(codes.values()) <= {0, STOPPED}:
            return STOPPED  # all have saved; mpiexec itself may return another code
        return self._report_death(output)

    def _report_death(self, output: mpiexec.Output) -> int:
        """Report the rank that ended without an error message; if it is unknown, print the process manager's output."""
        codes = self._status.codes()
        # The ranks that did not end by themselves, by process.
        rank_of = {pid: rank for rank, pid in self._status.pids().items() if rank not in codes}
        died, lost_rank = output.dead_process, self._first_lost()
        if died is None and lost_rank is not None:
            self._tell_death([lost_rank], f"hyfi: rank {lost_rank} was killed or crashed; all ranks were stopped")
        elif died is None:
            text = output.of_manager() or f"mpiexec ended with code {self._process.returncode}"
            warn(f"hyfi: not all ranks finished: {text}")
        else:
            first_pid = next((pid for pid in self._exits.pids if pid in rank_of), died.pid)
            # If both had ended before they were watched, only the process manager knows which was first.
            if {first_pid, died.pid} <= self._exits.unordered:
                first_pid = died.pid
            # Name both if they differ: a killed process ends with its last thread, perhaps after the next process.
            named = sorted(rank_of[pid] for pid in {first_pid, died.pid} if pid in rank_of)
            who = " or ".join(f"rank {rank}" for rank in named) or f"process {first_pid}"
            self._tell_death(named, f"hyfi: {who} ended with {died.how}; all ranks were stopped")
        if died is not None and died.number == signal.SIGBUS:
            warn(
                f"hyfi: signal {signal.SIGBUS:d}: memory that is a file had no room, or the file was cut off; now that "
                f"the ranks have ended, {describe_room()}: {advice_on_room()}"
            )
        if kernel_kills() > self._kills_before:
            advice = self._status.advice or GENERAL_ADVICE
            warn(f"hyfi: this machine ran out of memory and its kernel killed a process; {advice}")
        return FAULT

    def _tell_death(self, ranks: Sequence[int], text: str) -> None:
        warn(text)
        if self._run is not None:
            for rank in ranks:
                rank_log.append_error(self._run, rank, text)


def run_as_rank(body: Callable[[], int]) -> int:
    """Run ``body`` as one rank of a command and return the exit code of this process.

    The first exception of a rank is reported once, with its rank, and ends every rank: this function then does not
    return. A ``RequestError`` must be raised by all ranks (see `hyfi_core.comm.agreement.agree`): it is reported
    once, and every rank returns.
    """
    try:
        code = _run_as_rank(body)
    finally:
        rank_log.end()
    # A thread may still be inside MPI, which might crash if Python finalised now: the process exits at once.
    if peer_watch.rendezvous_waits():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code


def _run_as_rank(body: Callable[[], int]) -> int:
    """Run ``body``, report how it ended, and return the exit code of the process; see `run_as_rank`."""
    status, rank = RunStatus.from_environment(), own_rank()
    if status is not None:
        status.begin(rank)
        if status.stop_requested:
            signals.request()
    try:
        code = body()
    except RequestError as error:
        code = WRONG_REQUEST
        alone = status is None and isinstance(error, RendezvousError)  # there may be no rank 0
        if alone or _reports_refusal(status, rank):
            warn(f"hyfi: {error}")
    except KeyboardInterrupt:
        code = STOPPED
    except BaseException:
        _fail(status, rank)  # ends the process
    peer_watch.leave()
    if inside_launcher():
        # Before the exit code is written: a rank that a signal kills afterwards would have ended in two ways.
        signals.ignore_requests()
    if status is not None:
        status.end(rank, code)
        # Our launcher reads the code from that file; with another one than 0, mpiexec would kill ranks still at work.
        return 0
    leave_exit_code(code)
    return code


def _reports_refusal(status: RunStatus | None, rank: int) -> bool:
    """Whether this rank is the one that reports the ``RequestError`` of all ranks."""
    if status is None:
        return rank == 0
    try:
        # Only one rank can create the file, whichever comes first.
        (status.folder / "refusal-reported").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


PEER_LOST_S = 2.0
"""Delay before a rank reports a failed message; by then, the launcher has reported the peer that died."""


def _leave_to_launcher(status: RunStatus, rank: int, error: str) -> bool:
    """Let the launcher print the error: this rank's output may be lost with the process manager's pipes.

    Return False if the error cannot be left for it, as on a full disk.
    """
    try:
        status.claim_failure(rank, error)
    except OSError:
        return False
    return True


def _fail(status: RunStatus | None, rank: int) -> None:
    """Report the current error if it is the first, and end every rank of the job."""
    raised, trace = sys.exc_info()[1], traceback.format_exc().rstrip()
    # Memory, disks and files need a message only; for other errors it is None, and the traceback is reported.
    plain = message_of(raised) if raised is not None else None
    error = plain or trace
    if raised is not None and peer_watch.is_lost_peer(raised):
        time.sleep(PEER_LOST_S)  # most likely a peer died; that is the first error, and is reported in the meantime
    # First, so that other ranks do not report this one as lost while it writes its error.
    peer_watch.fail()
    leave_exit_code(FAULT)
    if plain and not isinstance(raised, RunInterruptedError):
        rank_log.note_error(trace)  # the traceback goes to the log only
    if status is not None and _leave_to_launcher(status, rank, error):
        rank_log.note_error(error)
    else:
        text = FAILED.format(rank=rank, error=error) if inside_launcher() else f"hyfi: {plain}" if plain else error
        with contextlib.suppress(OSError):  # where standard error goes, the disk may be full, too
            warn(text, "ERROR")
    at_failure.run_actions()
    rank_log.end()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # If a rank only exits, mpiexec ends the others, but not every srun does; MPI_Abort ends them everywhere.
    mpi = sys.modules.get("hyfi_core.comm.mpi")
    if mpi is not None and mpi.MPI.Is_initialized():
        with contextlib.suppress(Exception):
            mpi.MPI.COMM_WORLD.Abort(FAULT)
    os._exit(FAULT)
