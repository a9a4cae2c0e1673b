"""A process that may die alone, and the words between it and the rank that watches over it.

A killed MPI rank ends the job, regardless of the launcher's options; a killed child does not. It is restarted as
a program (a process that has called MPI must not fork), knows nothing of MPI, and ends with its parent.
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

from data.children import die_with_parent, environment_of_a_child

Word = dict[str, Any]
LOST_PEER = "a lost connection to another child"
"""Reported by a child that ended because of another one."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class ChildProcess:
    """A child under way.

    Args:
        program: run by this interpreter: ``["-m", "package.module", …]``; it calls :func:`Parent.of_arguments`.
        description: its first word.
        descriptors: open files that it shares.
    """

    def __init__(self, program: Sequence[str], description: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        # Requests to stop are for ranks: the child inherits the mask, so signals do not reach it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, *program, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the run's standard output is the trainers'
                env=environment_of_a_child(),
                pass_fds=[theirs.fileno(), *descriptors],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._words = Connection(ours.detach())
        self.say(description)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def say(self, word: Mapping[str, Any]) -> None:
        """Send a small message; to a dead child it is lost, and ``hear`` reports the death."""
        with contextlib.suppress(OSError):
            self._words.send_bytes(json.dumps(word).encode())

    def hear(self) -> Word | None:
        """Return the next word, None while there is none; never blocks.

        The last word of a child that has ended is ``{"kind": "died", "how": …}``, whatever ended it, again and again.
        """
        try:
            if self._words.poll(0):
                word: Word = json.loads(self._words.recv_bytes())
                return word
        except (EOFError, OSError):
            return {"kind": "died", "how": _how(self._process.wait())}
        return None

    def kill(self) -> None:
        """End it at once and return when it is gone."""
        self._process.kill()
        self._process.wait()
        self._words.close()


class Parent:
    """A child's connection to the rank that started it."""

    def __init__(self, words: Connection) -> None:
        self._words = words

    @classmethod
    def of_arguments(cls) -> Parent:
        """Return the parent that the command line names; from now on this process ends when the parent does."""
        descriptor, pid = int(sys.argv[-2]), int(sys.argv[-1])
        die_with_parent()
        if os.getppid() != pid:
            os._exit(0)  # it ended before the kernel was asked
        return cls(Connection(descriptor))

    def say(self, kind: str, **values: Any) -> None:
        """Send a small message."""
        self._words.send_bytes(json.dumps({"kind": kind, **values}).encode())

    def hear(self) -> Word:
        """Wait for the next word and return it; ends this process where the parent has gone."""
        try:
            word: Word = json.loads(self._words.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        return word


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"
