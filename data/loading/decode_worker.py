"""Workers that decode samples, each in its own child process: one at a time, or a few where reading is mostly waiting.

::

    supervisor                            worker
                      ◄──────────────     WorkerReady: it has started
      Lease           ──────────────►       decodes into shared memory
                      ◄──────────────     LeaseDone {bytes read}, or LeaseFailed {the error}
      closes          ──────────────►       exits

A worker is a new interpreter (not a fork: the parent has MPI threads), does not use MPI, and ends with its parent.
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
import threading
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from data.arrays import Pixels
from data.children import child_environment, die_with_parent
from data.loading.decode import Lease, Samples, decode
from data.samples.dataset import MOST_AT_A_TIME
from data.store.node_cache import node_cache
from hyfi_core.comm.activity import ACTIVITY

# Not ``-m``: pickled classes must be those of this module, not of ``__main__``.
_PROGRAM = "from data.loading.decode_worker import main; main()"

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that the parent handles; it ends its workers itself."""


@dataclass(frozen=True)
class WorkerReady:
    """A worker has started."""


@dataclass(frozen=True)
class LeaseDone:
    """A lease is finished.

    Attributes:
        name: The lease's name.
        read_bytes: Bytes of pixels read from the store.
        store_bytes: Bytes of chunks that the worker has decoded for the node's cache since its last answer.
        shared_bytes: Bytes of chunks that it has taken from the node's cache since then.
    """

    name: Hashable
    read_bytes: int
    store_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class LeaseFailed:
    """Decoding a lease raised an exception; another worker would fail, too.

    Attributes:
        error: The exception.
        text: The exception with its traceback.
    """

    error: Exception
    text: str


Answer = WorkerReady | LeaseDone | LeaseFailed


class Worker(Protocol):
    """One worker, as seen by its supervisor."""

    @property
    def connection(self) -> Connection:
        """Sends leases and receives answers; at end of file when the worker is dead."""
        ...

    def stop(self, patience_s: float = 0.0) -> bool:
        """Kill the worker and return when it has ended.

        Args:
            patience_s: Seconds in which it may end by itself first.

        Returns:
            Whether it ended by itself with an error; another worker would probably do so, too.
        """
        ...


class SharedBytes:
    """Anonymous shared memory, initially zero; it exists while a process has it mapped. Linux only.

    Pages are allocated when first written. Unlike a file in ``/dev/shm``, it does not outlive killed processes and is
    not limited by that file system's size.

    Attributes:
        descriptor: File descriptor to pass to a child process; ``close`` closes it, and ``array`` stays usable.
        array: The memory as uint8 ``(size_bytes,)``.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map the memory of ``descriptor``; `create` makes new memory."""
        self.descriptor = descriptor
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, max(1, size_bytes)), np.uint8)

    @classmethod
    def create(cls, size_bytes: int) -> SharedBytes:
        """Allocate new memory."""
        # Not inherited by programs that others start here; workers get it by `pass_fds`.
        descriptor = os.memfd_create("hyfi", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, size_bytes))  # an empty file cannot be mapped
        return cls(descriptor, size_bytes)

    @classmethod
    def from_bytes(cls, content: bytes) -> SharedBytes:
        """Allocate new memory with a copy of ``content``."""
        shared = cls.create(len(content))
        shared.array[: len(content)] = np.frombuffer(content, np.uint8)
        return shared

    def close(self) -> None:
        """Close the descriptor; the memory exists while a process has it mapped."""
        os.close(self.descriptor)


class Memory:
    """What all workers share: the memory of slots and cache, and the samples.

    Args:
        samples: Reads and augments images; child processes get a pickled copy.
        slots_bytes: Size of all slots.
        cache_bytes: Size of the cache of original images.
    """

    def __init__(self, samples: Samples, slots_bytes: int, cache_bytes: int) -> None:
        self.samples = samples
        self.slots = SharedBytes.create(slots_bytes)
        self.cache = SharedBytes.create(cache_bytes)

    @cached_property
    def pickled(self) -> SharedBytes:
        """The pickled samples, made on first use."""
        # In shared memory: one copy for all workers, instead of one through a pipe for each worker.
        return SharedBytes.from_bytes(pickle.dumps(self.samples))

    def close(self) -> None:
        """Close the descriptors; arrays of the memory stay usable."""
        self.slots.close()
        self.cache.close()
        if "pickled" in vars(self):
            self.pickled.close()


StartWorker = Callable[[Memory], Worker]


def work(connection: Connection, samples: Samples, slots: Pixels, cache: Pixels) -> None:
    """Decode leases until the connection is closed; leases that arrive meanwhile are decoded at the same time."""
    # (bytes that this process has added to the node's cache, bytes taken from it), up to the last answer.
    reported = _node_bytes()
    sending = threading.Lock()

    # Runs in threads of a pool. It replies with any error: nobody reads the future, so a raised error would be lost.
    def answer(lease: Lease) -> None:
        nonlocal reported
        reply: Answer
        try:
            reply = LeaseDone(lease.name, decode(samples, lease, slots, cache))
        # BaseException: also SystemExit, or a panic of a library in Rust.
        except BaseException as error:
            reply = LeaseFailed(_portable(error), traceback.format_exc())
        # One thread at a time: messages do not mix, and bytes count in one answer only.
        with sending, contextlib.suppress(OSError):
            if isinstance(reply, LeaseDone):
                (added, taken), reported = reported, _node_bytes()
                reply = replace(reply, store_bytes=reported[0] - added, shared_bytes=reported[1] - taken)
            connection.send(reply)

    with ThreadPoolExecutor(MOST_AT_A_TIME, "decode") as threads, contextlib.suppress(EOFError, OSError):
        connection.send(WorkerReady())
        while True:
            # A connection allows one thread that receives (this one) and one that sends (under the lock).
            threads.submit(answer, connection.recv())


def _node_bytes() -> tuple[int, int]:
    """Return the bytes of chunks that this process has added to the node's cache so far, and taken from it."""
    cache = node_cache()
    return (0, 0) if cache is None else (cache.store_bytes, cache.shared_bytes)


class ChildWorker:
    """A worker in a child process."""

    def __init__(self, memory: Memory) -> None:
        # A socket pair: both ends send and receive, and see the other's death as end of file.
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        shared = (memory.pickled, memory.slots, memory.cache)
        mappings = [f"{part.descriptor}:{part.array.size}" for part in shared]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(os.getpid()), str(theirs.fileno()), *mappings],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the run's standard output is the trainers'
            pass_fds=(theirs.fileno(), *(part.descriptor for part in shared)),
            # One thread each: there is a worker for each core already.
            env=child_environment() | {"OMP_NUM_THREADS": "1"},
            process_group=0,  # the parent handles Ctrl-C and the signals of launchers
        )
        # Otherwise our own copy would keep the socket open after the worker's death.
        theirs.close()
        ACTIVITY.helpers.add(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def connection(self) -> Connection:
        """Sends leases and receives answers."""
        return self._connection

    def stop(self, patience_s: float = 0.0) -> bool:
        """Kill the process unless it ends by itself in ``patience_s``; return whether it ended with an error."""
        self._connection.close()
        ACTIVITY.helpers.discard(self._process.pid)
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        # A negative code is the signal that killed it, ours or the out-of-memory killer's: no error of its own.
        return code > 0


def _portable(error: BaseException) -> Exception:
    """Return an error that can be sent: itself, or a RuntimeError with its text.

    The latter if it cannot be pickled, or is no Exception (a SystemExit would end the loader).
    """
    if isinstance(error, Exception):
        # Unpickle, too: an exception whose __init__ takes other arguments than `args` can be pickled only.
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    # `format_exception_only` works even if the error's own `__str__` fails.
    return RuntimeError("".join(traceback.format_exception_only(error)).strip())


def _mapped(mapping: str) -> Pixels:
    """Map the memory of ``descriptor:size``."""
    descriptor, size = mapping.split(":")
    shared = SharedBytes(int(descriptor), int(size))
    shared.close()  # the mapping stays valid without its descriptor
    return shared.array


def main() -> None:
    """Run a worker process.

    Arguments of its command line: the parent's process id, the descriptor of the connection, and ``descriptor:size`` of
    the pickled samples, the slots and the cache.
    """
    # First of all: a signal before this would end the worker with a traceback.
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:
        return  # the parent ended before die_with_parent took effect
    pickled, slots, cache = (_mapped(mapping) for mapping in sys.argv[3:])
    work(Connection(descriptor), pickle.loads(pickled.tobytes()), slots, cache)
