"""The pool of decoding threads: one for each process, started at first use; a forked process starts its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from data.cores import usable_cores

T = TypeVar("T")
R = TypeVar("R")

_MAX_THREADS = 8
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_threads: int | None = None
_in_pool = threading.local()


def set_decode_threads(count: int) -> None:
    """Set the number of decoding threads of this process and of those forked from it later.

    Raises:
        ValueError: The count is below one.
    """
    global _threads, _pool
    if count < 1:
        raise ValueError(f"number of decoding threads is {count}; use 1 or more")
    with _lock:
        former, _pool, _threads = _pool, None, count
    if former is not None:
        # Without waiting: what was submitted to it is finished all the same.
        former.shutdown(wait=False)


def decode_threads() -> int:
    """Return the number of threads: as set, by default the number of usable cores, at most eight."""
    return _threads or min(_MAX_THREADS, usable_cores())


def run_in_pool(call: Callable[[T], R], parts: Iterable[T]) -> list[R]:
    """Call ``call`` with each part on the pool's threads, and return the results in order.

    On a thread of the pool itself (or with a single part or thread) the calls are made in place.

    Raises:
        Exception: The first exception of ``call``, in the order of the parts, after all calls have ended.
    """
    pending = list(parts)
    if len(pending) < 2 or decode_threads() == 1 or in_pool():
        return [call(part) for part in pending]
    futures = [submit(call, part) for part in pending]
    for future in futures:
        future.exception()  # wait for all: none may write into the caller's memory after an exception is raised
    return [future.result() for future in futures]


def submit(call: Callable[[T], R], part: T) -> Future[R]:
    """Start ``call(part)`` on the pool."""
    with _lock:
        # Under the lock to the end: a pool that was replaced between the two lines accepts no work.
        pool = _current()
        return pool.submit(call, part)


def in_pool() -> bool:
    """Whether this is a thread of the pool, which must not wait for other threads of the pool (deadlock)."""
    return getattr(_in_pool, "yes", False)


def _current() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(decode_threads(), thread_name_prefix="decode", initializer=_mark)
    return _pool


def _mark() -> None:
    _in_pool.yes = True


def _after_fork() -> None:
    """Reset the module in a forked process: threads do not survive a fork, and the lock may have been held."""
    global _lock, _pool, _in_pool
    _lock, _pool, _in_pool = threading.Lock(), None, threading.local()


os.register_at_fork(after_in_child=_after_fork)
