"""Trainer 0's side of validation by validators: sends snapshots, and collects results in the order of the steps.

::

    policy all      | 3 → evaluated | 6 → evaluated | 9 → waits …        at most QUEUE snapshots in flight; then the
                                                                         trainer waits, so no step is skipped
    policy latest   | 3 → evaluated | 6 is kept | 9 replaces 6 …         the trainer never waits; the latest is kept
                                                                         here and sent when the validators are idle
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from data.loading.backoff import Backoff
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.runtime.saving.snapshot import Snapshot, SnapshotPool, State
from workflows.evaluation.evaluate import EvaluatedMetrics

WORK_TAG, SNAPSHOT_TAG, RESULT_TAG = 110, 111, 112
QUEUE = 2
"""Largest number of snapshots that are being sent or evaluated."""

Policy = Literal["all", "latest"]


class ValidationClient:
    """Communicates with validator 0. Only ``submit`` (policy ``all``, queue full), ``drain`` and ``close`` wait.

    Args:
        world: All ranks.
        leader: Rank of validator 0 in ``world``.
        policy: ``all`` or ``latest``.

    Attributes:
        gave_up: Whether the validators have reported that they cannot continue.
    """

    def __init__(self, world: Communicator, leader: int, policy: Policy = "all") -> None:
        self.gave_up = False
        self._world, self._leader, self._policy = world, leader, policy
        self._pool = SnapshotPool()
        self._unsent: list[Snapshot] = []  # submitted, not announced to the validators yet
        self._sending: list[tuple[Pending, Snapshot | None]] = []  # messages, with the snapshot that is sent, if any
        self._results: list[tuple[int, EvaluatedMetrics]] = []  # (step, metrics), not collected yet
        self._in_flight: list[int] = []  # steps of snapshots that are sent and have no result yet
        self._ended = False  # whether the validators have said goodbye

    @property
    def open_steps(self) -> tuple[int, ...]:
        """Steps whose results have not been collected yet, in ascending order."""
        collected = (step for step, _ in self._results)
        return (*collected, *self._in_flight, *(snapshot.step for snapshot in self._unsent))

    @property
    def waiting(self) -> int:
        """Number of snapshots without a result, at most ``QUEUE``."""
        return len(self._in_flight) + len(self._unsent)

    def submit(self, step: int, state: State, stop_requested: Callable[[], bool]) -> bool:
        """Submit the weights of ``step`` for validation; see :class:`Snapshot` for when ``state`` may be changed.

        Returns:
            False if ``stop_requested`` returned True while the queue was full: these weights were not submitted.
        """
        if self._policy == "latest":
            for replaced in self._unsent:
                if replaced.ready():  # else a GPU still writes into its memory, which must not be reused
                    self._pool.release(replaced)
            self._unsent.clear()
        # With `gave_up`, nothing is sent any more: the trainers will validate this step.
        elif not self._wait(lambda: self.gave_up or self.waiting < QUEUE, stop_requested):
            return False
        # Copied, because the next update changes the weights in place.
        self._unsent.append(self._pool.acquire(step, state))
        self._progress()
        return True

    def collect(self) -> list[tuple[int, EvaluatedMetrics]]:
        """Return new results since the last call; does not block."""
        self._progress()
        results, self._results = self._results, []
        return results

    def drain(self, stop_requested: Callable[[], bool]) -> bool:
        """Wait for all results, or until the validators give up; return False if ``stop_requested`` returned True."""
        return self._wait(lambda: self.gave_up or not self.waiting, stop_requested)

    def forget(self) -> None:
        """Forget all open steps, for when the validators have given up and the trainers validate these themselves."""
        self._unsent.clear()
        self._in_flight.clear()

    def close(self, stopped: bool, discard: bool = False) -> None:
        """End the service; returns when the validators have ended.

        Args:
            stopped: The run was stopped; open validations are dropped.
            discard: Open results are not needed any more.
        """
        self._unsent.clear()
        message = {"kind": "end", "stopped": stopped, "discard": discard}
        self._sending.append((self._world.send_object(message, self._leader, WORK_TAG), None))
        # Both: the validators' "bye", and our own messages, whose memory MPI may still read.
        self._wait(lambda: self._ended and not self._sending, lambda: False)

    def _wait(self, ready: Callable[[], bool], stop_requested: Callable[[], bool]) -> bool:
        """Wait until ``ready``; return False if a stop was requested before."""
        backoff = Backoff()
        self._progress()
        while not ready():
            if stop_requested():
                return False
            backoff.pause()
            self._progress()
        return True

    def _progress(self) -> None:
        """Release the snapshots that are sent, take new results, and send further snapshots as the queue has room."""
        unfinished = []
        for pending, snapshot in self._sending:  # None: a message without weights
            if not pending.test():
                unfinished.append((pending, snapshot))
            elif snapshot is not None:
                self._pool.release(snapshot)
        self._sending = unfinished
        # Before sending: a result makes room in the queue.
        while (received := self._world.poll_object(RESULT_TAG, self._leader)) is not None:
            _, message = received
            self._handle(message)
        if self.gave_up:
            return
        # With "latest", the validators have at most one: a newer one can still replace those that wait here.
        most_in_flight = QUEUE if self._policy == "all" else 1
        # Not ready: a GPU still copies weights into the snapshot.
        while self._unsent and len(self._in_flight) < most_in_flight and self._unsent[0].ready():
            self._send(self._unsent.pop(0))

    def _send(self, snapshot: Snapshot) -> None:
        """Start sending a snapshot to the validators; it counts as in flight until its metrics arrive."""
        work = {"kind": "validate", "step": snapshot.step, "bytes": snapshot.flat.numel()}
        # Announced first, so that the validator can post its receive into shared memory.
        self._sending.append((self._world.send_object(work, self._leader, WORK_TAG), None))
        flat = Message(self._leader, snapshot.flat, SNAPSHOT_TAG)
        self._sending.append((self._world.exchange([flat], []), snapshot))
        self._in_flight.append(snapshot.step)

    def _handle(self, message: EvaluatedMetrics) -> None:
        """Take a message of the validators: a result, or that there will be no more."""
        if message["kind"] == "bye":
            self._ended = True
        elif message["kind"] == "gave up":
            self.gave_up = True
        else:
            self._results.append((message["step"], message["metrics"]))
            self._in_flight.remove(message["step"])
