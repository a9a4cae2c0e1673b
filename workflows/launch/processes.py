"""Linux processes: listing and killing a session's processes, and the order in which processes end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def session_members(session: int) -> list[int]:
    """Return the ids of a session's live processes (without zombies)."""
    members = []
    for pid in _pids():
        state, session_of_pid = _state_and_session(pid)
        # A zombie cannot be killed, only be waited for by its parent: counting it, `kill_session` would never be done.
        if session_of_pid == session and state != "Z":
            members.append(pid)
    return members


def kill_session(session: int, seconds: float = 2.0) -> None:
    """Kill every process of a session; return when none is left, or after ``seconds``."""
    deadline_s = time.monotonic() + seconds
    # Repeat until none is left, because a process may start another one before it is killed.
    while (members := session_members(session)) and time.monotonic() < deadline_s:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _state_and_session(pid: int) -> tuple[str, int]:
    """Return (state, session) of /proc/<pid>/stat; the process name may contain spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # It has ended since it was listed.
        return "Z", -1
    # After the last ")", as the name itself may have any: `1234 (my (odd) name) S 1 1234 77 …`.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[3])


class ExitOrder:
    """Records the order in which processes end.

    A process manager that loses one rank kills the others within milliseconds, and may report any of them. The kernel
    reports ends of processes in order.

    Attributes:
        pids: Processes that have ended so far, in the order of their ends.
        unordered: Processes among ``pids`` that had ended before they were watched; their order is unknown.
    """

    def __init__(self) -> None:
        self._queue = select.epoll()
        self._pid_of: dict[int, int] = {}
        self._known: set[int] = set()
        self.pids: list[int] = []
        self.unordered: set[int] = set()

    def wait(self, pids: Iterable[int], timeout_s: float) -> None:
        """Wait until another process ends, at most ``timeout_s``; ``pids``: all processes to watch."""
        # Each once: an id that is used again is another process.
        for pid in set(pids) - self._known:
            self._known.add(pid)
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended_before(pid)
            except (OSError, AttributeError):
                continue  # a kernel without pidfd
            else:
                if _is_readable(descriptor):  # it has ended, but its parent has not waited for it yet
                    os.close(descriptor)
                    self._ended_before(pid)
                    continue
                self._pid_of[descriptor] = pid
                self._queue.register(descriptor, select.EPOLLIN)
        # epoll keeps a list of what became ready, in that order; poll and select would go through their own list.
        for descriptor, _ in self._queue.poll(timeout_s):
            self._queue.unregister(descriptor)
            os.close(descriptor)
            self.pids.append(self._pid_of.pop(descriptor))

    def _ended_before(self, pid: int) -> None:
        self.pids.append(pid)
        self.unordered.add(pid)

    def close(self) -> None:
        """Close all file descriptors."""
        for descriptor in self._pid_of:
            os.close(descriptor)
        self._pid_of.clear()
        self._queue.close()


def _is_readable(descriptor: int) -> bool:
    question = select.poll()
    question.register(descriptor, select.POLLIN)
    return bool(question.poll(0))
