"""Where the seconds of training go: every step's time, split by what it was spent on.

::

    step            |── compute ──|halo|stage|reduce|wait|   seconds of the step itself
    between steps   |validation|save|                        booked on the next step's record

``halo``, ``stage`` and ``reduce`` are the seconds in which this rank only communicated or waited for other ranks to do
so; what is hidden behind computing is not in them. ``wait`` is for images. The rest of a step is ``compute``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hyfi_core.comm.base import Communicator

KINDS = ("compute", "halo", "stage", "reduce", "wait", "validation", "save")
MESSAGES = ("halo", "stage", "reduce")

Spent = dict[str, float]


class StepTime:
    """The clock of one trainer: filled during a step and between two, read at the end of each step."""

    def __init__(self) -> None:
        self._now = dict.fromkeys(KINDS, 0.0)
        self._epoch = dict.fromkeys(KINDS, 0.0)
        self._reported = dict.fromkeys(KINDS, 0.0)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Book seconds on their kinds; kinds that are no part of the split are left out."""
        for kind, spent in seconds.items():
            if kind in self._now:
                self._now[kind] += spent

    @contextmanager
    def booked(self, kind: str) -> Iterator[None]:
        """Book what is done inside on one kind."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._now[kind] += time.perf_counter() - start_s

    def end_step(self, seconds: float) -> Spent:
        """Return where a step's ``seconds``, and those between it and the step before, have gone; begin anew."""
        spent, self._now = self._now, dict.fromkeys(KINDS, 0.0)
        known = spent["wait"] + sum(spent[kind] for kind in MESSAGES)
        spent["compute"] = max(0.0, seconds - known)
        for kind in KINDS:
            self._epoch[kind] += spent[kind] - self._reported[kind]
        self._reported = dict.fromkeys(KINDS, 0.0)
        return spent

    def end_epoch(self, trainers: Communicator) -> list[Spent] | None:
        """Return every trainer's seconds since the epoch began, on rank 0; None elsewhere (collective).

        What came after the last step belongs to this epoch, though it will be in the next step's record.
        """
        mine = {kind: self._epoch[kind] + self._now[kind] for kind in KINDS}
        self._epoch, self._reported = dict.fromkeys(KINDS, 0.0), dict(self._now)
        return trainers.gather_objects(mine)

    def forget(self) -> None:
        """Leave out what was booked so far: the first step captures the model and warms memory."""
        self._epoch = dict.fromkeys(KINDS, 0.0)
