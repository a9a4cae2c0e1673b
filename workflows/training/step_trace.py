"""Trace of a few training steps in ``RUN/trace.json``, for Perfetto: the spans of all trainers.

::

    data            |images |                                          |images |
    compute                 |F0.s0.d0      |B0.s0.d0            |update|
    communication           |  |halo|        |halo|  |reduce    |
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.files import write_atomically
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import Span
from hyfi_core.runtime.engine import Engine
from hyfi_core.schedule.trace import TraceEvent, to_json
from workflows.training.inputs.run_inputs import TrainingEngine


def traced_steps(finished: int, last: int, count: int) -> range:
    """Return the steps to trace: ``count`` of them from the second on, because the first captures the model.

    Args:
        finished: Number of steps that were finished before this process started.
        last: The run's last step.
        count: Number of steps to trace; if the run has only one step, that one is traced.
    """
    first = min(finished + 2, last)
    return range(first, min(first + count, last + 1))


class StepTrace:
    """One trainer's part of a trace; all trainers call its methods together.

    Args:
        path: File that rank 0 writes.
        engine: The trainers' engine.
        trainers: All trainers.
        steps: Steps to trace; may be empty.
    """

    def __init__(self, path: Path, engine: TrainingEngine, trainers: Communicator, steps: range) -> None:
        self._path, self._engine, self._trainers, self._steps = path, engine, trainers, steps
        self._origin_s: float | None = None
        # The engine's spans (kind, begin, end), and those recorded here (name, kind, begin, end).
        self._engine_spans: list[Span] = []
        self._named: list[tuple[str, str, float, float]] = []

    def begin(self, step: int) -> None:
        """Start recording if ``step`` is the first to trace. Time 0 is the end of a barrier of all trainers."""
        if self._steps and step == self._steps[0]:
            # Clocks of hosts have unrelated zeros; ranks leave a barrier at almost the same time, which is 0 for all.
            self._trainers.barrier()
            self._origin_s = time.perf_counter()
            self._engine.record_spans(self._engine_spans)

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """Record the time of the body as one event."""
        begin_s = time.perf_counter()
        yield
        if self._origin_s is not None:
            self._named.append((name, kind, begin_s, time.perf_counter()))

    def accumulated(self) -> None:
        """Record the actions of the engine's last call of ``accumulate``."""
        if self._origin_s is not None and isinstance(self._engine, Engine):
            self._named += [(str(action), str(action.verb), begin, end) for action, begin, end in self._engine.events]

    def end(self, step: int) -> None:
        """Write the trace if ``step`` is the last to trace."""
        if self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Stop recording and write what was recorded, if anything."""
        if self._origin_s is None:
            return
        # Set to None at once: a second call, at the end of the run, writes nothing.
        origin_s, self._origin_s = self._origin_s, None
        self._engine.record_spans(None)
        # A span of the engine has its kind as its name, too.
        mine = self._named + [(kind, kind, begin, end) for kind, begin, end in self._engine_spans]
        placed = [(name, kind, begin - origin_s, end - origin_s) for name, kind, begin, end in mine]
        gathered = self._trainers.gather_objects((socket.gethostname(), placed))
        if gathered is not None:
            events, names = [], {}
            for rank, (host, spans) in enumerate(gathered):
                names[rank] = f"rank {rank} on {host}"
                events += [TraceEvent(rank, name, begin_s, end_s, kind) for name, kind, begin_s, end_s in spans]
            write_atomically(self._path, to_json(events, names).encode())
