"""Supervision: all ranks of a job stop when one fails or ends early, and when they are deadlocked.

    rank 0   raises ──▶ claims the failure, prints it, aborts the job
    rank 1   waits  ──▶ sees the claim, or is aborted; prints nothing

    rank 0   has ended ──────────────────┐  both are on the board (``board``)
    rank 1   waits in step 3, F0.s0.d0 ──┴─▶ no rank computes: reports where ranks wait, aborts the job

    rank 1   is killed ──▶ its connection closes: the first rank names it (``peer_watch``), all ranks stop

A rank writes to the board when a long wait begins or ends; otherwise it reads it twice a second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from hyfi_core.comm.activity import ACTIVITY, Wait, named_ranks
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.supervision.board import Board, RankStatus, open_board
from hyfi_core.comm.supervision.peer_watch import PeerWatch, is_lost_peer, watch_peers
from hyfi_core.comm.supervision.time_limit import LIMIT_VARIABLE, time_limit_s
from hyfi_core.errors import FAULT, RequestError

PEER_LOST_S = 2.0
"""Delay before a rank reports a failed message: most likely another rank has failed and reports the cause."""
_PERIOD_S = 0.5
_LONG_S = 1.0  # waits longer than this are written to the board
_STUCK_S = 3.0  # if no rank computes for this long, the job is deadlocked
_ENDED_S = 1.5  # in place of ``_STUCK_S`` if a rank has ended
_STAY_S = (
    5.0  # time for which a rank that leaves keeps its connections, so that others can report that they wait for it
)
_SLOWEST_BYTES_S = 50e6  # lowest speed of a large message: while it is sent, it is no deadlock that no rank computes
_RANKS_PER_PERIOD = 256  # with more ranks, each reads the board less often


def supervise(comm: Communicator, store: Any = None) -> None:
    """Stop all ranks when one fails (collective over ``comm``, which is the whole job).

    After this call, an uncaught exception in any thread stops all ranks; so does a rank that is killed, one that ends
    while others wait for it, and a wait of more than ``HYFI_TIMEOUT_S``.

    Args:
        comm: all ranks.
        store: store of the board; None to open one on the first rank.

    Raises:
        RequestError: ``HYFI_TIMEOUT_S`` is not a number of seconds.
    """
    limit_s = time_limit_s()
    board = open_board(comm) if store is None else Board(store, comm.rank, comm.size)
    peers = watch_peers(comm, _tell_lost)
    comm.barrier()  # every rank is on the board before any reads it
    RankSupervisor(comm, board, peers, limit_s).install()


def _tell_lost(rank: int) -> None:
    words = (
        f"hyfi: rank {rank} was killed or crashed (a signal, os._exit, out of memory, its node lost), all ranks stop"
    )
    print(words, file=sys.stderr, flush=True)


class RankSupervisor:
    """Failure handling of one rank.

    Args:
        comm: all ranks.
        board: None if there is none: then a failure still stops all ranks, but deadlocks are not detected.
        peers: detects killed ranks; None if not possible.
        limit_s: time limit of one wait; 0 for none.
    """

    def __init__(self, comm: Communicator, board: Board | None, peers: PeerWatch | None, limit_s: float) -> None:
        self._comm, self._board, self._peers, self._limit_s = comm, board, peers, limit_s
        self._process = os.getpid()
        self._leaving = threading.Event()
        # States of all ranks when the job last made progress, and the time.
        self._unchanged: tuple[list[RankStatus], float] = ([], 0.0)

    def install(self) -> None:
        """Install the interpreter's exception hooks and start watching."""
        before = sys.excepthook

        def main_hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if self._is_forked():
                before(kind, error, trace)
            else:
                self.fail(error)

        def thread_hook(failed: threading.ExceptHookArgs) -> None:
            # SystemExit in a thread ends that thread alone, as in Python without supervision.
            if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit) and not self._is_forked():
                self.fail(failed.exc_value)

        sys.excepthook, threading.excepthook = main_hook, thread_hook
        # Registered last, so it runs first: before the backend ends the connections on which others may still wait.
        atexit.register(self._leave)
        if self._board is not None:
            threading.Thread(target=self._watch, args=(self._board,), daemon=True, name="hyfi-watch").start()

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error if it is the first of all ranks, and stop them."""
        words = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, RequestError):
            words = str(error)
        elif is_lost_peer(error):
            # Most likely another rank has failed first: give it time to report the cause, so that this rank is silent.
            time.sleep(PEER_LOST_S)
            words = "\n".join([words, *self._who_ended()])
        self._end_all(f"hyfi: rank {self._comm.rank} failed, all ranks stop:\n{words}")

    def _is_forked(self) -> bool:
        """Whether this is a forked child of the rank."""
        return os.getpid() != self._process

    def _who_ended(self) -> list[str]:
        states: list[RankStatus] = []
        with contextlib.suppress(RuntimeError):
            states = self._board.states() if self._board is not None else []
        ended = [(rank, status.where) for rank, status in enumerate(states) if status.state == "ended"]
        return [f"rank {rank} has ended while rank {self._comm.rank} still waits: {where}" for rank, where in ended]

    def _end_all(self, words: str) -> NoReturn:
        """Print an error, unless another rank has already printed one, and end all ranks."""
        with contextlib.suppress(RuntimeError):  # the board's host has ended: other ranks report
            if self._board is not None and not self._board.claim_failure():
                self._end_quietly(self._board)
        sys.stdout.flush()
        print(words, file=sys.stderr, flush=True)
        if self._board is not None:
            with contextlib.suppress(RuntimeError):
                self._board.set_reported()
        time.sleep(0.2)  # on abort, a process manager may drop output that it has not forwarded
        self._abort()

    def _end_quietly(self, board: Board) -> NoReturn:
        """End all ranks without a message, after giving the rank that has failed time to report the cause."""
        deadline_s = time.monotonic() + PEER_LOST_S
        with contextlib.suppress(RuntimeError):
            while not board.reported and time.monotonic() < deadline_s:
                time.sleep(0.02)
        time.sleep(0.3)
        self._abort()

    def _abort(self) -> NoReturn:
        if self._peers is not None:
            # The others then know that this end is reported, and do not report it as well.
            self._peers.fail()
        self._comm.abort(FAULT)

    def _leave(self) -> None:
        """Report that this rank ends, and wait for the other ranks."""
        if self._is_forked():
            return
        self._leaving.set()
        if self._board is not None:
            with contextlib.suppress(RuntimeError):
                self._board.post("ended", ACTIVITY.where())
                self._stay(self._board)
        if self._peers is not None:
            self._peers.leave()

    def _stay(self, board: Board) -> None:
        """Wait until all ranks have ended: the first rank, which hosts the board, for ever; others for some seconds.

        MPI does the same when it ends. Under other launchers an early exit would close this rank's connections, and
        those that wait for it would fail before they can report in which step.
        """
        first = self._comm.rank == 0
        deadline_s = time.monotonic() + _STAY_S
        pause_s = 0.05 if first else 0.25 * max(1.0, self._comm.size / _RANKS_PER_PERIOD)
        while (first or time.monotonic() < deadline_s) and any(status.state != "ended" for status in board.states()):
            if board.failed:
                self._end_quietly(board)
            time.sleep(pause_s)
        if not first:
            board.leave()
        # If the board's host ended earlier, a rank that still reads the board would print a warning with a stack.
        deadline_s = time.monotonic() + _STAY_S
        while first and board.left < self._comm.size - 1 and time.monotonic() < deadline_s:
            time.sleep(pause_s)

    def _watch(self, board: Board) -> None:
        """Check the board again and again until this rank leaves; the more ranks, the more rarely."""
        pause_s = _PERIOD_S * max(1.0, self._comm.size / _RANKS_PER_PERIOD)
        while not self._leaving.wait(pause_s):
            try:
                self._check(board, time.monotonic())
            except RuntimeError:
                return  # the board's host, the first rank, has ended: the launcher stops the others

    def _check(self, board: Board, now_s: float) -> None:
        """Check once whether a rank has failed, and whether this one is deadlocked."""
        if board.failed:
            self._end_quietly(board)
        wait = ACTIVITY.wait
        if wait is None or now_s - wait.since_s < _LONG_S:
            return
        if wait.on_end is None:  # not yet on the board
            self._note(board, wait)
        states = board.states()
        # A rank that computes may take long; any new report, such as of the end of a wait, shows that the job goes on.
        if states != self._unchanged[0] or any(status.state == "computes" for status in states):
            self._unchanged = states, now_s
        if ACTIVITY.wait is not wait:  # it ended while the board was read
            return
        if now_s - self._unchanged[1] > _patience_s(states):
            self._end_all(_stuck(states))
        if self._limit_s and now_s - wait.since_s > self._limit_s:
            self._end_all(_too_long(self._comm.rank, self._limit_s, states))

    def _note(self, board: Board, wait: Wait) -> None:
        """Write a wait to the board, and later its end."""

        def ended() -> None:
            with contextlib.suppress(RuntimeError):
                board.post("computes", "")

        wait.on_end = ended
        board.post("waits", f"{ACTIVITY.where()}, in {wait.what()}", wait.nbytes)
        if ACTIVITY.wait is not wait:  # it ended in the meantime
            ended()


def _patience_s(states: list[RankStatus]) -> float:
    """Return how long all ranks may wait before they count as deadlocked; longer if large messages are pending."""
    quiet_s = _ENDED_S if any(status.state == "ended" for status in states) else _STUCK_S
    return quiet_s + max(status.nbytes for status in states) / _SLOWEST_BYTES_S


def _stuck(states: list[RankStatus]) -> str:
    """Return the message about ranks that wait for each other, or for ranks that have ended."""
    ended = [rank for rank, status in enumerate(states) if status.state == "ended"]
    waiting = [rank for rank, status in enumerate(states) if status.state == "waits"]
    if ended:
        has, waits = _verb(ended, "has", "have"), _verb(waiting, "waits", "wait")
        head = f"{named_ranks(ended)} {has} ended while {named_ranks(waiting)} still {waits}"
    else:
        head = f"{named_ranks(waiting)} wait for each other (deadlock)"
    return f"hyfi: {head}, all ranks stop; every rank must make the same calls:\n{_listed(states)}"


def _too_long(rank: int, limit_s: float, states: list[RankStatus]) -> str:
    return (
        f"hyfi: rank {rank} has waited for other ranks for more than {limit_s:g} s ({LIMIT_VARIABLE}), all ranks "
        f"stop:\n" + _listed(states)
    )


def _verb(ranks: list[int], singular: str, more: str) -> str:
    return singular if len(ranks) == 1 else more


def _listed(states: list[RankStatus]) -> str:
    return "\n".join(
        f"  rank {rank} {status.state}" + (f": {status.where}" if status.where else "")
        for rank, status in enumerate(states)
    )
