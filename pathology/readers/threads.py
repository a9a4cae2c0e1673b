"""The threads that decode: one pool for each process, made when it is first needed and never carried over a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from data.cores import usable_cores

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 8
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_threads: int | None = None
_in_pool = threading.local()


def set_decode_threads(count: int) -> None:
    """Say how many threads this process, and those forked from it, decode with; workers share the cores.

    Raises:
        ValueError: The count is below one.
    """
    global _threads, _pool
    if count < 1:
        raise ValueError(f"number of decoding threads is {count}; use 1 or more")
    with _lock:
        old, _pool, _threads = _pool, None, count
    if old is not None:
        old.shutdown(wait=False)


def decode_threads() -> int:
    """Return the number of threads: as set, else one for each core that this process may use, at most eight."""
    return _threads or min(_MOST_THREADS, usable_cores())


def run_in_pool(call: Callable[[T], R], parts: Iterable[T]) -> list[R]:
    """Return ``call`` of each part, in order, made on the pool's threads; on this thread where it is one of them.

    Raises:
        Exception: The first one that ``call`` raised, in the order of the parts, after all have ended.
    """
    waiting = list(parts)
    if len(waiting) < 2 or decode_threads() == 1 or in_pool():
        return [call(part) for part in waiting]
    futures = [submit(call, part) for part in waiting]
    for future in futures:
        future.exception()  # nothing may still write into the caller's memory when an error reaches the caller
    return [future.result() for future in futures]


def submit(call: Callable[[T], R], part: T) -> Future[R]:
    """Start ``call(part)`` on the pool."""
    with _lock:
        pool = _current()
        return pool.submit(call, part)


def in_pool() -> bool:
    """Whether this thread is one of the pool's: it must not wait for others of them."""
    return getattr(_in_pool, "yes", False)


def _current() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(decode_threads(), thread_name_prefix="decode", initializer=_mark)
    return _pool


def _mark() -> None:
    _in_pool.yes = True


def _after_fork() -> None:
    """Threads do not survive a fork, and the lock may have been held: start from nothing."""
    global _lock, _pool, _in_pool
    _lock, _pool, _in_pool = threading.Lock(), None, threading.local()


os.register_at_fork(after_in_child=_after_fork)
