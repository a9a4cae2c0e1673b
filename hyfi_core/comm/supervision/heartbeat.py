"""Heartbeats: what a rank reports about itself every second, read from its current activity.

A thread samples the activity, so that training pays nothing for it. A process that is stopped, that waits for a dead
disk with the interpreter's lock, or whose node hangs does not beat; one whose GPU hangs beats, but does not move.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hyfi_core.comm.activity import ACTIVITY, Activity

_IDLE_S = 1.0
"""A service that paused within this time has nothing to do."""
_BUSY = 0.05
"""A child process that uses more than this part of a core works."""


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        begun: Training steps that it has begun.
        where: The place in the program: ``step 3, F0.s1.d0``.
        moved: Whether anything happened since the last heartbeat.
        waits: Whether it waits for other ranks or for work.
        slow: Whether it does something that may take long without any event.
        stops: Whether it has been requested to stop.
    """

    begun: int
    where: str
    moved: bool
    waits: bool
    slow: bool
    stops: bool


class Heart:
    """Makes the heartbeats of this process.

    Args:
        stops: Whether a stop was requested.
        activity: Activity of the process.
    """

    def __init__(self, stops: Callable[[], bool] = lambda: False, activity: Activity = ACTIVITY) -> None:
        self._stops, self._activity = stops, activity
        self._mark: Hashable = None
        self._used_s: dict[int, float] = {}
        self._since_s = time.monotonic()

    def beat(self) -> Beat:
        """Return the next heartbeat."""
        time_s, activity = time.monotonic(), self._activity
        # Compared by identity: making texts takes longer, and only those that are shown are made.
        wait, mark = activity.wait, (activity.begun, id(activity.action), id(activity.wait), activity.count)
        moved = mark != self._mark
        self._mark = mark
        states = {pid: state for pid in tuple(activity.helpers) if (state := _process(pid)) is not None}
        used_s = {pid: seconds for pid, (_, seconds) in states.items()}
        elapsed_s = time_s - self._since_s
        moved |= any(used_s[pid] - self._used_s.get(pid, 0.0) > _BUSY * elapsed_s for pid in used_s)
        self._used_s, self._since_s = used_s, time_s
        where = activity.where() if wait is None else f"{activity.where()}, in {wait.what()}"
        # States of processes that do not run: stopped, held by a debugger (``t``), waiting for a disk.
        frozen = [str(pid) for pid, (state, _) in states.items() if state in "TtD"]
        if frozen:
            where += f", whose child process {', '.join(frozen)} does not run"
        idle = time_s - activity.idle_s < _IDLE_S
        return Beat(
            begun=activity.begun,
            where=where,
            moved=moved,
            waits=wait is not None or idle,
            slow=bool(activity.slow),
            stops=self._stops(),
        )


def _process(pid: int) -> tuple[str, float] | None:
    """Return a process's state (``T``: stopped, ``D``: waits for a disk) and processor seconds; None if unknown."""
    with suppress(OSError, IndexError, ValueError):
        # Fields are counted after the last bracket, because a program's name may have blanks and brackets: 0 is the
        # state, 11 and 12 are the ticks in user and system mode (fields 3, 14 and 15 of proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None
