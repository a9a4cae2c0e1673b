"""Compiling in the background: child processes fill Inductor's cache on disk while this process computes.

    this process    step 1 │ trace │ step 2 … 9 │ load, within a second or two │ step 10, compiled …
    child 1                        └─ job 0, job 3 …─┘
    child 2                        └─ job 1, job 2 …─┘

A child imports PyTorch and compiles; it holds no model, no values and no connection to other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.job_limits import usable_cores
from hyfi_core.lowering.compiling.graph_job import GraphJob, arithmetic, take_over_arithmetic

_MOST_CHILDREN = 4
_CORES_FOR_EACH = 4
"""Cores of this process for each child beyond the first: trainers and loaders need cores, too."""


class BackgroundBatch:
    """Jobs that child processes compile.

    Args:
        jobs: graphs to compile.

    Raises:
        OSError: a process cannot be started; those that were started have been ended.

    Attributes:
        children: number of processes.
        began_s: when they were started, by ``time.monotonic``.
    """

    def __init__(self, jobs: Sequence[GraphJob]) -> None:
        self.began_s = time.monotonic()
        self.children = max(1, min(_MOST_CHILDREN, usable_cores() // _CORES_FOR_EACH, len(jobs)))
        # Equal shares of work; the length of a graph's code stands for the time to compile it. The longest job comes
        # first, and each goes to the child with the least work so far.
        shares: list[list[int]] = [[] for _ in range(self.children)]
        for index in sorted(range(len(jobs)), key=lambda index: -len(jobs[index].code)):
            shortest = min(shares, key=lambda share: sum(len(jobs[job].code) for job in share))
            shortest.append(index)
        self._open = dict.fromkeys(range(len(jobs)))  # the jobs that are not finished, in order
        self._running: list[_Child] = []
        # Before the first child: if a later one cannot be started, those that run are ended, too.
        self._stop = weakref.finalize(self, _end, self._running)
        for share in shares:
            self._running.append(_Child(share, [jobs[index] for index in share]))

    @property
    def left(self) -> int:
        """Number of jobs that are not finished."""
        return len(self._open)

    def finished(self) -> dict[int, str | None]:
        """Return the jobs that have finished since the last call: index -> why it failed, or None if compiled."""
        results: dict[int, str | None] = {}
        for child in self._running:
            results |= child.results()
        for index in results:
            self._open.pop(index, None)
        if not self._open:
            self._stop()
        return results

    def close(self) -> None:
        """End the children; jobs that are not finished are dropped."""
        self._stop()


class _Child:
    """A process that compiles some of the jobs, one after the other."""

    def __init__(self, indices: Sequence[int], jobs: Sequence[GraphJob]) -> None:
        self._left = list(indices)
        self._text = b""
        # A file, not a pipe: a child that ends early cannot block or break the writer.
        with tempfile.TemporaryFile() as file:
            settings = {"arithmetic": arithmetic(), "threads": torch.get_num_threads(), "parent": os.getpid()}
            pickle.dump((settings, jobs), file)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],  # without the current folder: a file there may hide a module
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a job that fails says why in its result
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            )
        assert self._process.stdout is not None
        # Results are read between two steps, which must not wait for a compiler.
        os.set_blocking(self._process.stdout.fileno(), False)
        ACTIVITY.helpers.add(self._process.pid)

    def results(self) -> dict[int, str | None]:
        """Return the jobs that have finished since the last call: index -> why it failed, or None if compiled."""
        if not self._left:
            return {}
        ended = self._process.poll()  # before reading: what a dead child has written is all there
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._process.stdout.fileno(), 1 << 16):
                self._text += part
        # After the last line break comes the beginning of a result that is not yet complete.
        *lines, self._text = self._text.split(b"\n")
        # Results come in the order of the jobs, so that a line needs no index.
        results = {self._left.pop(0): json.loads(line) for line in lines}
        if ended is not None and self._left:
            results |= dict.fromkeys(self._left, f"the process that compiles it ended with code {ended}")
            self._left = []
        return results

    def end(self) -> None:
        """End the process, and wait for it."""
        ACTIVITY.helpers.discard(self._process.pid)
        # Killed: a child holds nothing that needs an orderly end.
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def reason(error: Exception) -> str:
    """Return an error's type and first line; with the second line if the first ends in a colon."""
    first, *lines = str(error).strip().splitlines() or [""]
    announced = f" {lines[0].strip()}" if lines and first.rstrip().endswith(":") else ""  # "backend='…' raised:"
    return f"{type(error).__name__}: {first}{announced}"


def _end(children: list[_Child]) -> None:
    for child in children:
        child.end()


def _end_with(parent: int) -> None:
    """End this process when its parent ``parent`` (process id) has ended."""
    # A killed parent closes no pipe, but its child gets another parent, so getppid changes.
    while os.getppid() == parent:
        time.sleep(1)
    # At once, from any thread: sys.exit would end this thread alone.
    os._exit(1)


def main() -> None:
    """Compile the jobs on standard input; print a line of JSON for each: null, or why it failed."""
    settings: dict[str, Any]
    jobs: list[GraphJob]
    settings, jobs = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(settings["parent"],), daemon=True).start()
    os.nice(5)  # the ranks come first
    # A copy of standard output for results; whatever else prints goes to standard error.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers may print
    torch.set_num_threads(settings["threads"])
    take_over_arithmetic(settings["arithmetic"])
    for job in jobs:
        failure = None
        try:
            job.compiled()
        except Exception as error:
            failure = reason(error)
        print(json.dumps(failure), file=results, flush=True)


if __name__ == "__main__":
    main()
