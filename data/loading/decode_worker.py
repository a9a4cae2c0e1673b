"""Workers that decode: each has one lease at a time, in a child process of its own.

::

    supervisor                            worker
                      ◄──────────────     WorkerReady: it has started
      Lease           ──────────────►       decodes into shared memory
                      ◄──────────────     LeaseDone {bytes read}, or LeaseFailed {the error}
      end of stream   ──────────────►       leaves

A child is a new interpreter (never a fork: its parent has MPI threads), sees no MPI, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data.children import die_with_parent, environment_of_a_child
from data.loading.decode import Pixels, Samples, decode

# Not ``-m``: pickled classes must be found under this module's name, not under __main__.
_PROGRAM = "from data.loading.decode_worker import main; main()"

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class WorkerReady:
    """A worker has started."""


@dataclass(frozen=True)
class LeaseDone:
    """A lease is finished.

    Attributes:
        read_bytes: bytes of pixels taken from the store for it.
    """

    read_bytes: int


@dataclass(frozen=True)
class LeaseFailed:
    """A lease cannot be finished, by anybody.

    Attributes:
        error: what was raised.
        text: with its traceback.
    """

    error: Exception
    text: str


Answer = WorkerReady | LeaseDone | LeaseFailed


class Worker(Protocol):
    """One worker, as its supervisor sees it."""

    @property
    def connection(self) -> Connection:
        """Where leases go and answers come from; at its end when the worker is dead."""
        ...

    def stop(self, patience_s: float = 0.0) -> bool:
        """End the worker, whatever it does, and return when it has ended.

        Args:
            patience_s: how long it may take to end by itself.

        Returns:
            Whether it had ended by itself, with an error: another one would, too.
        """
        ...


class SharedBytes:
    """Anonymous memory that several processes map, zero at first; it lasts until its last user is gone. Linux only.

    Pages are taken from the system when they are first written. A name in ``/dev/shm`` would outlive processes that
    are killed, and is bounded by that file system's size; this is not.

    Attributes:
        descriptor: to hand to a child process; closed by ``close``, which leaves this process's view usable.
        array: this process's view, uint8 ``(size_bytes,)``.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map the memory of ``descriptor``, which another process has created."""
        self.descriptor = descriptor
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, max(1, size_bytes)), np.uint8)

    @classmethod
    def create(cls, size_bytes: int) -> SharedBytes:
        """Make new memory."""
        descriptor = os.memfd_create("hyfi", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, size_bytes))
        return cls(descriptor, size_bytes)

    @classmethod
    def holding(cls, content: bytes) -> SharedBytes:
        """Make memory that begins with ``content``."""
        shared = cls.create(len(content))
        shared.array[: len(content)] = np.frombuffer(content, np.uint8)
        return shared

    def close(self) -> None:
        """Give the descriptor back; the memory lasts as long as anybody maps it."""
        os.close(self.descriptor)


class Memory:
    """What workers share: the slots that they write, the cache, and the samples as the supervisor has them.

    Args:
        samples: where pixels come from; child processes get a copy.
        slots_bytes: for parts.
        cache_bytes: for decoded images.
    """

    def __init__(self, samples: Samples, slots_bytes: int, cache_bytes: int) -> None:
        self.samples = samples
        self.slots = SharedBytes.create(slots_bytes)
        self.cache = SharedBytes.create(cache_bytes)

    @cached_property
    def pickled(self) -> SharedBytes:
        """The samples, for child processes."""
        return SharedBytes.holding(pickle.dumps(self.samples))

    def close(self) -> None:
        """Give the descriptors back; views of the memory stay usable."""
        self.slots.close()
        self.cache.close()
        if "pickled" in vars(self):
            self.pickled.close()


StartWorker = Callable[[Memory], Worker]


def work(connection: Connection, samples: Samples, slots: Pixels, cache: Pixels) -> None:
    """Decode leases until the connection is closed."""
    with contextlib.suppress(EOFError, OSError):
        connection.send(WorkerReady())
        while True:
            lease = connection.recv()
            answer: Answer
            try:
                answer = LeaseDone(decode(samples, lease, slots, cache))
            except Exception as error:
                answer = LeaseFailed(_portable(error), traceback.format_exc())
            connection.send(answer)


class ChildWorker:
    """A worker in a process of its own, which may die at any moment."""

    def __init__(self, memory: Memory) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        shared = (memory.pickled, memory.slots, memory.cache)
        words = [f"{part.descriptor}:{part.array.size}" for part in shared]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(os.getpid()), str(theirs.fileno()), *words],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the run's standard output is the trainers'
            pass_fds=(theirs.fileno(), *(part.descriptor for part in shared)),
            env=environment_of_a_child() | {"OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C and the signals of launchers are the parent's to answer
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def connection(self) -> Connection:
        """Where leases go and answers come from."""
        return self._connection

    def stop(self, patience_s: float = 0.0) -> bool:
        """Kill the process, unless it ends by itself, and wait for its end."""
        self._connection.close()
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return code > 0


def _portable(error: Exception) -> Exception:
    """Return the error, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _mapped(word: str) -> Pixels:
    descriptor, size = word.split(":")
    shared = SharedBytes(int(descriptor), int(size))
    shared.close()
    return shared.array


def main() -> None:
    """Be a child: arguments are the parent's id, the connection's descriptor, and the memory's descriptors:sizes."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:
        return  # the parent was gone before it could be watched
    pickled, slots, cache = (_mapped(word) for word in sys.argv[3:])
    work(Connection(descriptor), pickle.loads(pickled.tobytes()), slots, cache)
