"""Child processes that a rank supervises, and the messages between both.

A killed MPI rank ends the job, whatever the launcher's options; a killed child process does not. A child is started as
a program (a process that has initialised MPI must not fork), does not use MPI, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from data.children import child_environment, die_with_parent
from hyfi_core.comm.activity import ACTIVITY

ChildMessage = dict[str, Any]
LOST_PEER = "a lost connection to another child"
"""Reported by a child that ended because of another one."""

_SECONDS_TO_END = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class ChildProcess:
    """A running child process.

    Args:
        program: Arguments for this interpreter, ``["-m", "package.module", …]``; it calls
            :func:`Parent.from_arguments`.
        description: The first message to send.
        descriptors: Open file descriptors that the child inherits.
    """

    def __init__(self, program: Sequence[str], description: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        # The child inherits this mask: requests to stop are handled by ranks only.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, *program, str(theirs.fileno()), str(os.getpid())],
                # What is typed on the terminal is for the rank.
                stdin=subprocess.DEVNULL,
                stdout=2,  # the run's standard output is the trainers'
                env=child_environment(),
                pass_fds=[theirs.fileno(), *descriptors],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # A socket ends when every process has closed its copy: with this one open, the child's end is not noticed.
        theirs.close()
        # The watch for stalled ranks counts the child's work as this process's.
        ACTIVITY.helpers.add(self._process.pid)
        self._connection = Connection(ours.detach())
        self.send(description)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a small message; if the child is dead it is lost, and ``receive`` reports that."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> ChildMessage | None:
        """Return the next message, None if there is none; never blocks.

        After the last message of a child that has ended, every call returns ``{"kind": "died", "how": …}``.
        """
        try:
            if self._connection.poll(0):
                message: ChildMessage = json.loads(self._connection.recv_bytes())
                return message
        except (EOFError, OSError):
            return {"kind": "died", "how": self._how_it_ended()}
        return None

    def _how_it_ended(self) -> str:
        """Return how the process ended, after its end of the connection was closed."""
        try:
            # The kernel closes it as the process ends: waiting takes a moment at most.
            return _how(self._process.wait(timeout=_SECONDS_TO_END))
        except subprocess.TimeoutExpired:
            # Code in the child, such as a user's model, has closed only the connection: it could not report any more.
            self._process.kill()
            self._process.wait()
            return "a closed connection, after which it did not end"

    def kill(self) -> None:
        """Kill the process and return when it has ended."""
        self._process.kill()
        self._process.wait()
        ACTIVITY.helpers.discard(self._process.pid)
        self._connection.close()


class Parent:
    """A child's connection to the rank that started it; use it in the child process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def from_arguments(cls) -> Parent:
        """Return the connection given on the command line, and make this process end when its parent does."""
        descriptor, pid = int(sys.argv[-2]), int(sys.argv[-1])
        die_with_parent()
        if os.getppid() != pid:
            os._exit(0)  # the parent ended before die_with_parent took effect
        return cls(Connection(descriptor))

    def send(self, kind: str, **values: Any) -> None:
        """Send a small message."""
        self._connection.send_bytes(json.dumps({"kind": kind, **values}).encode())

    def receive(self) -> ChildMessage:
        """Wait for the next message and return it; ends this process if the parent has ended."""
        try:
            message: ChildMessage = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        return message


def _how(code: int) -> str:
    """Return how a process ended, from the code of `subprocess`: ``exit code 1`` or ``signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"
