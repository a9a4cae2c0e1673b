"""Ranks as threads take turns: a rank that waits hands its turn to the next rank that can go on.

    rank 0   ── run ── waits │                  │ ── run ── …
    rank 1                   │ ── run ── waits  │
    rank 2                   │ (may go on) ···· │ ····

Python runs one thread at a time, and PyTorch lets go of the interpreter in every operator. If many threads could run,
each operator would hand over to another thread: hundreds of switches between threads in each step of a rank, which take
longer than the step. So the number of ranks that run at once adapts. It falls to one while turns are short, as in
Python code and tiny operators. It grows by one at each tick in which no turn was handed on, so that a rank that
computes for long, or waits for something other than a message, never blocks the others for long.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_TICK_S = 0.005
_SHORT_TURNS = 4  # more turns than this in a tick are short ones
_POLLING_S = 0.001  # a rank that polls keeps its turn for this long
_STUCK_S = 1.0  # if all ranks wait for this long, they are deadlocked


class PeerFailedError(RuntimeError):
    """Another rank has failed, so this one ends. Never the first error."""


class DeadlockError(RuntimeError):
    """Every rank waits or has ended, and no pending operation can complete."""


@dataclass(eq=False, slots=True)
class _Waiter:
    """A thread that sleeps until it is given a turn.

    Attributes:
        rank: its rank in the whole world.
        ready: returns whether it may go on.
        what: describes what it waits for.
        woken: held by the thread that wakes it.
    """

    rank: int
    ready: Callable[[], bool]
    what: Callable[[], str]
    woken: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.woken.acquire()


class ThreadWorld:
    """All ranks of one run: the lock for all shared state, whose turn it is, and what each rank waits for.

    Args:
        size: ranks of the whole world.
        strict: whether sends are rendezvous in one order for each pair.

    Attributes:
        size: see above.
        strict: see above.
        lock: held while shared state is read or changed.
        failed: whether a rank has failed.
    """

    def __init__(self, size: int, strict: bool) -> None:
        self.size = size
        self.strict = strict
        self.lock = threading.Lock()
        self.failed = False
        # As many as there are cores at first: more would only wait for each other.
        self._turns = min(size, len(os.sched_getaffinity(0)))
        self._running: dict[int, float] = {}  # rank -> when its turn began
        self._ready: deque[_Waiter] = deque()  # those whose wait is over, in the order of their turns
        self._waiting: dict[int, list[_Waiter]] = {}  # rank -> its waits that are not over
        self._handed = 0  # turns that were handed on since the number of turns was last chosen
        self._deadlock: str | None = None  # the message, once there is one
        self._ended: set[int] = set()
        self._all_ended = threading.Event()
        self._still_since_s = time.monotonic()  # when a rank last ended or was notified

    def begin(self, rank: int) -> None:
        """Wait for a rank's first turn."""
        with self.lock:
            self._line_up(rank)

    def end(self, rank: int, failed: bool) -> None:
        """Record that a rank has ended, and hand on its turn."""
        if failed:
            self.fail()
        with self.lock:
            self._running.pop(rank, None)
            self._ended.add(rank)
            self._still_since_s = time.monotonic()
            self._wake_next()
            if len(self._ended) == self.size:
                self._all_ended.set()

    def fail(self) -> None:
        """End all ranks: each raises from its current wait."""
        with self.lock:
            self.failed = True
            # Every rank gets a turn, because it must run to raise from its wait.
            self._turns = self.size
            self.notify(range(self.size))

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            PeerFailedError: one has.
            DeadlockError: no rank can go on.
        """
        if self._deadlock is not None:
            raise DeadlockError(self._deadlock)
        if self.failed:
            raise PeerFailedError("another rank has failed")

    def notify(self, ranks: Iterable[int]) -> None:
        """Let these ranks go on if their waits are over; under ``lock``."""
        self._still_since_s = time.monotonic()
        for rank in ranks:
            waiters = self._waiting.get(rank)
            if waiters is None:
                continue
            left = [waiter for waiter in waiters if not (self.failed or waiter.ready())]
            if len(left) < len(waiters):
                self._ready.extend(waiter for waiter in waiters if waiter not in left)
                self._waiting[rank] = left
                if not left:
                    del self._waiting[rank]
        self._wake_next()

    def wait_for(self, rank: int, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait, under ``lock``, until ``ready``.

        Args:
            rank: its rank in the whole world.
            ready: called again whenever ``notify`` is called for this rank.
            describe: describes the wait; like ``ready``, it may be called by other threads, under ``lock``.

        Raises:
            PeerFailedError: another rank has failed.
            DeadlockError: strict, and no rank can ever make it ready.
        """
        while not ready():
            self.check()
            waiter = _Waiter(rank, ready, describe)
            self._waiting.setdefault(rank, []).append(waiter)
            self._sleep(waiter)

    def pause(self, rank: int) -> None:
        """Let other ranks run, under ``lock``; called by a rank that polls and has received nothing."""
        begun_s = self._running.get(rank)
        # Not at once: a rank that polls between two slices of work would lose its turn at each of them.
        if self._ready and begun_s is not None and time.monotonic() - begun_s > _POLLING_S:
            self._line_up(rank)

    def oversee(self, timeout_s: float) -> bool:
        """Decide how many ranks run at once, until all have ended; return whether they have, within the time limit."""
        now_s = time.monotonic()
        end_s = now_s + timeout_s
        while not self._all_ended.wait(_TICK_S) and now_s < end_s:
            with self.lock:
                before_s, now_s = now_s, time.monotonic()
                self._choose_how_many((now_s - before_s) / _TICK_S)
                if self.strict:
                    self._detect_deadlock()
        return self._all_ended.is_set()

    def _choose_how_many(self, ticks: float) -> None:
        """Choose how many ranks run at once, after ``ticks`` ticks with the same number."""
        handed, self._handed = self._handed, 0  # turns that were handed on in this time
        # One rank has kept its turn all the time while others could go on: it computes for long, or waits elsewhere.
        if self._ready and not handed:
            self._turns = min(self.size, self._turns + 1)
            self._wake_next()
        # After a failure every rank has a turn, so that each raises from its wait: see `fail`.
        elif handed > _SHORT_TURNS * ticks and not self.failed:
            self._turns = max(1, self._turns - 1)

    def _detect_deadlock(self) -> None:
        """End all ranks with an error if each has waited or ended for some time: none could wake another."""
        still_s = time.monotonic() - self._still_since_s
        # Ranks that run, or are ready to, neither wait nor have ended.
        if still_s < _STUCK_S or len(self._waiting.keys() | self._ended) < self.size or not self._waiting:
            return
        waiters = [waiter for _, of_rank in sorted(self._waiting.items()) for waiter in of_rank]
        lines = [f"rank {waiter.rank} waits for {waiter.what()}" for waiter in waiters]
        lines += [f"rank {rank} has ended" for rank in sorted(self._ended)]
        # All ranks run at once now: each wait ends with this error.
        self._deadlock, self.failed, self._turns = "deadlock: " + "; ".join(lines), True, self.size
        self.notify(range(self.size))

    def _line_up(self, rank: int) -> None:
        """Wait for a turn behind all ranks that can go on."""
        waiter = _Waiter(rank, lambda: True, lambda: "its turn")
        self._ready.append(waiter)
        self._sleep(waiter)

    def _sleep(self, waiter: _Waiter) -> None:
        """Hand on the turn of this rank, and return when it has one again."""
        self._running.pop(waiter.rank, None)
        self._wake_next()
        # A wake-up between the release and the next line is not lost: it releases ``woken``, which is then acquired at
        # once.
        self.lock.release()
        waiter.woken.acquire()
        self.lock.acquire()

    def _wake_next(self) -> None:
        while self._ready and len(self._running) < self._turns:
            waiter = self._ready.popleft()
            self._running[waiter.rank] = time.monotonic()
            self._handed += 1
            waiter.woken.release()
