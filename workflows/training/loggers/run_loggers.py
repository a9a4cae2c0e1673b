"""The loggers of a run on rank 0: each has a thread, so that no step waits for one, and none can end the run.

::

    step        add ─▶ queue ─▶ thread: begin, write … write, end
    validation  add ─┘                 └ an exception: said once, and this logger records nothing more
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.files import write_atomically
from hyfi_core.errors import RequestError
from workflows.console import warn
from workflows.training.loggers.mlflow_logger import MlflowLogger
from workflows.training.loggers.record import LoggedRecord, MetricsLogger, RunOutcome, scalars
from workflows.training.loggers.wandb_logger import WandbLogger

IDENTITIES_FILE = "loggers.json"
_LOGGERS: Mapping[str, tuple[type[MetricsLogger], tuple[str, ...]]] = {
    "mlflow": (MlflowLogger, ("mlflow", "sqlalchemy", "alembic")),
    "wandb": (WandbLogger, ("wandb",)),
}
"""Name in ``run.loggers`` -> logger, and the packages that it needs."""
_EVERY_S = 1.0
"""Records that arrive within this time are written together."""
_END_S = 60.0
"""How long the end of a run waits for a logger."""


def check_loggers(names: Sequence[str]) -> None:
    """Check that the packages of loggers are installed; imports none of them.

    Raises:
        RequestError: A package is missing.
    """
    for name in names:
        _, packages = _LOGGERS[name]
        # `find_spec`, because importing them takes seconds.
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            raise RequestError(f"run.loggers: {name} needs {', '.join(missing)}: pip install 'hyfi[{name}]'")


class RunLoggers:
    """Hands the records of a run to its loggers.

    Args:
        names: Values of ``run.loggers``.
        folder: The run's folder; a file in it keeps the identity of the run for each logger.
        settings: ``section.key`` -> value, of the run's configuration.
        resumed: Whether the run continues; otherwise, identities of an earlier run in this folder do not count.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], resumed: bool) -> None:
        # The threads of two loggers may get their identities at the same time, and both write the whole file.
        self._path, self._lock = folder / IDENTITIES_FILE, threading.Lock()
        self._identities: dict[str, str] = self._read() if resumed else {}
        makers = [(name, _LOGGERS[name][0]) for name in names]
        self._threads = [
            _LoggerThread(make(folder, settings, self._identities.get(name)), self._keep) for name, make in makers
        ]

    def add(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Record the numbers of a step or of a validation, later; see `scalars`."""
        if self._threads:
            # A chart has no place for NaN; metrics.jsonl has null.
            finite = {name: value for name, value in scalars(kind, values) if math.isfinite(value)}
            record = LoggedRecord(kind, step, finite)
            for thread in self._threads:
                if thread.is_alive():  # a logger that has failed takes no more records
                    thread.records.put(record)

    def end(self, outcome: RunOutcome) -> None:
        """Record how the run has ended; wait up to a minute for records that are not written yet."""
        for thread in self._threads:
            thread.records.put(outcome)
            thread.ending.set()
        # One minute for all loggers together.
        until_s = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                warn(f"hyfi: {thread.name} has not taken everything after {_END_S:g} s; the run ends without the rest")

    def _read(self) -> dict[str, str]:
        try:
            return {str(name): str(key) for name, key in json.loads(self._path.read_text()).items()}
        # Without the file, the run is new for its loggers; that is no reason to end it.
        except (OSError, ValueError, AttributeError):
            return {}

    def _keep(self, name: str, identity: str) -> None:
        with self._lock:
            self._identities[name] = identity
            write_atomically(self._path, (json.dumps(self._identities) + "\n").encode())


class _LoggerThread(threading.Thread):
    """The thread of one logger; it ends with the process, whatever it waits for.

    Attributes:
        records: The records to write, in order; the outcome is the last.
        ending: Set when nothing more comes, so that it writes at once.
    """

    def __init__(self, logger: MetricsLogger, keep: Callable[[str, str], None]) -> None:
        # A daemon: a request that hangs in a library must not keep the process from ending.
        super().__init__(name=logger.name, daemon=True)
        self.records: queue.SimpleQueue[LoggedRecord | RunOutcome] = queue.SimpleQueue()
        self.ending = threading.Event()
        self._logger, self._keep = logger, keep
        self.start()

    def run(self) -> None:
        """Write until the run has ended, or the logger fails."""
        try:
            # Kept before the first record, so that a run killed at any moment continues under the same identity.
            self._keep(self.name, self._logger.begin())
            while (outcome := self._write()) is None:
                self.ending.wait(_EVERY_S)
            self._logger.end(outcome)
        except BaseException as error:  # code of other packages: no failure of a logger may end the run
            cause = next(iter(str(error).strip().splitlines()), "")
            warn(
                f"hyfi: run.loggers: {self.name} failed ({type(error).__name__}: {cause}); the run goes on without it, "
                f"and metrics.jsonl has everything"
            )

    def _write(self) -> RunOutcome | None:
        """Wait for a record, write all that have arrived, and return the outcome if it is among them."""
        # Taking all that have arrived needs one request to the server for many steps.
        items = [self.records.get()]
        while not self.records.empty():
            items.append(self.records.get())
        outcome = next((item for item in items if isinstance(item, RunOutcome)), None)
        records = [item for item in items if isinstance(item, LoggedRecord)]
        if records:
            self._logger.write(records)
        return outcome
