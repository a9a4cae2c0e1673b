"""The records that loggers take, and the base class of loggers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NOT_LOGGED = ("epoch", "slides", "cases")


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of a record's numbers, as in ``validation/auroc``; intervals are left out."""
    for name, value in values.items():
        # `intervals` holds pairs under the names of metrics: no scalars, and they would repeat these names.
        if isinstance(value, Mapping) and name != "intervals":
            yield from scalars(f"{kind}/{name}", value)
        # `_NOT_LOGGED`: counts that do not change, and the epoch, which the axis shows already.
        elif isinstance(value, (int, float)) and name not in _NOT_LOGGED:
            yield f"{kind}/{name}", float(value)


@dataclass(frozen=True)
class LoggedRecord:
    """The numbers of one step or one validation.

    Attributes:
        kind: ``train`` or ``validation``.
        step: The step that ran, or whose weights were validated.
        values: Name to number, as `scalars` yields them; all are finite.
        time_s: Seconds since 1970.
    """

    kind: str
    step: int
    values: Mapping[str, float]
    time_s: float = field(default_factory=time.time)


@dataclass(frozen=True)
class RunOutcome:
    """How a run has ended.

    Attributes:
        state: ``done``, ``stopped`` or ``failed``.
        best_step: Step of the best checkpoint; None without one.
        files: Files of the run, name -> path.
    """

    state: str
    best_step: int | None
    files: Mapping[str, Path]


class MetricsLogger(ABC):
    """A place for the metrics of a run. One thread calls its methods, in this order; each may raise anything.

    Args:
        folder: The run's folder.
        settings: ``section.key`` -> value, of the run's configuration.
        identity: The id under which the logger knows the run; None for a new run.
    """

    name: str
    """The value in ``run.loggers``."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], identity: str | None) -> None:
        self.folder, self.settings, self.identity = folder, settings, identity

    @abstractmethod
    def begin(self) -> str:
        """Open the run with the given identity, or a new one; return its identity."""

    @abstractmethod
    def write(self, records: Sequence[LoggedRecord]) -> None:
        """Record numbers."""

    @abstractmethod
    def end(self, outcome: RunOutcome) -> None:
        """Record how the run has ended, and close."""
