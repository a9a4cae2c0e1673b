"""Trainer 0's side of validation on other ranks: hands snapshots over, collects results in the order of the steps.

::

    policy all      | 3 → evaluated | 6 → evaluated | 9 → waits for a place …      at most QUEUE on their way; then the
                                                                              trainer waits, so no step is skipped
    policy latest   | 3 → evaluated | 6 kept here | 9 takes the place of 6 …    the trainer never waits; what was kept
                                                                              is sent when the validators are free
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from data.loading.backoff import Backoff
from hyfi_core.comm.base import Communicator, Message, Pending
from workflows.evaluation.snapshot import Pool, Snapshot, State

WORK_TAG, SNAPSHOT_TAG, RESULT_TAG = 110, 111, 112
QUEUE = 2
"""Most snapshots that are on their way to the validators or being evaluated."""

Policy = Literal["all", "latest"]
Metrics = dict[str, Any]


class ValidationClient:
    """Talks to validator 0. Only ``submit`` (policy ``all``, queue full), ``drain`` and ``close`` ever wait.

    Args:
        world: all ranks.
        leader: world rank of validator 0.
        policy: ``all`` or ``latest``.

    Attributes:
        gave_up: whether the validators have reported that they cannot continue.
    """

    def __init__(self, world: Communicator, leader: int, policy: Policy = "all") -> None:
        self.gave_up = False
        self._world, self._leader, self._policy = world, leader, policy
        self._pool = Pool()
        self._kept: list[Snapshot] = []
        self._sending: list[tuple[Pending, Snapshot | None]] = []
        self._results: list[tuple[int, Metrics]] = []
        self._away: list[int] = []
        self._bye = False

    @property
    def open_steps(self) -> tuple[int, ...]:
        """Steps whose results have not been collected yet, ascending."""
        come = (step for step, _ in self._results)
        return (*come, *self._away, *(snapshot.step for snapshot in self._kept))

    @property
    def waiting(self) -> int:
        """How many snapshots wait for their results: never more than ``QUEUE``."""
        return len(self._away) + len(self._kept)

    def submit(self, step: int, state: State, impatient: Callable[[], bool]) -> bool:
        """Hand the weights of ``step`` over; see :class:`Snapshot` for when ``state`` may be changed.

        Returns:
            False where ``impatient`` returned True while waiting for a place: these weights were not handed over.
        """
        if self._policy == "latest":
            for replaced in self._kept:
                if replaced.ready():  # a GPU may still be writing into the others' memory
                    self._pool.give(replaced)
            self._kept.clear()
        elif not self._wait(lambda: self.gave_up or self.waiting < QUEUE, impatient):
            return False
        self._kept.append(self._pool.take(step, state))
        self._progress()
        return True

    def collect(self) -> list[tuple[int, Metrics]]:
        """Return new results since the last call; does not block."""
        self._progress()
        results, self._results = self._results, []
        return results

    def drain(self, impatient: Callable[[], bool]) -> bool:
        """Wait for all results, or until the validators give up; return False if ``impatient`` returned True first."""
        return self._wait(lambda: self.gave_up or not self.waiting, impatient)

    def forget(self) -> None:
        """Stop expecting results: the trainers validate these steps."""
        self._kept.clear()
        self._away.clear()

    def close(self, stopped: bool, needless: bool = False) -> None:
        """End the service. Returns when the validators have ended.

        Args:
            stopped: the run ends early; open validations are dropped.
            needless: open results are not wanted any more.
        """
        self._kept.clear()
        word = {"kind": "end", "stopped": stopped, "needless": needless}
        self._sending.append((self._world.send_object(word, self._leader, WORK_TAG), None))
        self._wait(lambda: self._bye and not self._sending, lambda: False)

    def _wait(self, ready: Callable[[], bool], impatient: Callable[[], bool]) -> bool:
        backoff = Backoff()
        self._progress()
        while not ready():
            if impatient():
                return False
            backoff.pause()
            self._progress()
        return True

    def _progress(self) -> None:
        """Make progress on sends and receives."""
        still_open = []
        for pending, snapshot in self._sending:
            if not pending.test():
                still_open.append((pending, snapshot))
            elif snapshot is not None:
                self._pool.give(snapshot)
        self._sending = still_open
        while (found := self._world.poll_object(RESULT_TAG, self._leader)) is not None:
            self._hear(found[1])
        most = QUEUE if self._policy == "all" else 1
        while self._kept and len(self._away) < most and not self.gave_up and self._kept[0].ready():
            self._send(self._kept.pop(0))

    def _send(self, snapshot: Snapshot) -> None:
        work = {"kind": "validate", "step": snapshot.step, "bytes": snapshot.flat.numel()}
        self._sending.append((self._world.send_object(work, self._leader, WORK_TAG), None))
        flat = Message(self._leader, snapshot.flat, SNAPSHOT_TAG)
        self._sending.append((self._world.exchange([flat], []), snapshot))
        self._away.append(snapshot.step)

    def _hear(self, word: Metrics) -> None:
        if word["kind"] == "bye":
            self._bye = True
        elif word["kind"] == "gave up":
            self.gave_up = True
        else:
            self._results.append((word["step"], word["metrics"]))
            self._away.remove(word["step"])
