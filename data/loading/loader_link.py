"""The link of a trainer to its loaders: what it asks for, and the order in which it arrives.

::

    trainer                                       loader
      hello {parts, replica, …}       ─────────►    learns what may be requested
      request {numbers, waited}       ─────────►    has the samples decoded by child processes
      (receive posted before)         ◄─────────    uint8 (3, h, w), in the order of the requests
      goodbye {stopped}               ─────────►    answers open requests with blanks, removes the trainer
                                      ◄─────────    report {samples, bytes, …}

A trainer sends a request only after it has posted the receives, so the number of messages in flight is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.loading.backoff import Backoff
from data.loading.feed import Report
from hyfi_core.comm.base import Communicator, Message, Pending

CONTROL_TAG, PIXELS_TAG, REPORT_TAG = 101, 102, 103


@dataclass
class _Answer:
    """What loaders send for one request.

    Attributes:
        number: The request's number.
        receives: The posted receives; they keep the memory alive.
        pending: Receives that are not complete, by loader.
    """

    number: int
    receives: Sequence[Message]
    pending: dict[int, Pending]

    def loaders_behind(self) -> set[int]:
        """Return the loaders that have not sent all; empty when the answer is complete."""
        self.pending = {loader: pending for loader, pending in self.pending.items() if not pending.test()}
        return set(self.pending)


class LoaderLink:
    """Asks loaders for pixels and receives them.

    Args:
        comm: Communicator of all ranks.
        loaders: Ranks of the loaders that serve this trainer.
        hello: What the loaders must know before the first request.
        check_signals: Called while waiting, for signals; may raise.

    Attributes:
        reports: Report of each loader, by rank; complete after ``close``.
    """

    def __init__(
        self, comm: Communicator, loaders: Sequence[int], hello: Mapping[str, Any], check_signals: Callable[[], None]
    ) -> None:
        self.reports: dict[int, Report] = {}
        self._comm, self._loaders, self._check_signals = comm, tuple(loaders), check_signals
        self._answers: deque[_Answer] = deque()  # not complete, in the order of requests
        self._sends: list[Pending] = []
        self._requests = 0
        self._waited: set[int] = set()  # loaders for which this trainer has waited since their last request
        # "every": of n loaders, number k serves the replica's samples k, k + n, k + 2n …
        n = len(self._loaders)
        self._send({loader: {"kind": "hello", **hello, "every": [k, n]} for k, loader in enumerate(self._loaders)})

    def loader_of(self, index_in_replica: int) -> int:
        """Return the loader of the replica's sample with this index."""
        return self._loaders[index_in_replica % len(self._loaders)]

    def request(self, receives: Sequence[Message], requests: Mapping[int, Mapping[str, Any]]) -> int:
        """Post receives, then send the requests that they answer.

        Args:
            receives: In the order in which each loader will send.
            requests: Request by loader.

        Returns:
            The index of this request: 0, 1, 2, …
        """
        receives_of: dict[int, list[Message]] = {}
        for message in receives:
            receives_of.setdefault(message.peer, []).append(message)
        # Posted before the request is sent: pixels that MPI does not expect would be kept in buffers of its own.
        pending = {loader: self._comm.exchange([], messages) for loader, messages in receives_of.items()}
        self._answers.append(_Answer(self._requests, receives, pending))
        self._send(
            {
                loader: {"kind": "request", "waited": loader in self._waited, **request}
                for loader, request in requests.items()
            }
        )
        # Told to these loaders; the others learn of it with their own next request.
        self._waited -= requests.keys()
        self._requests += 1
        return self._requests - 1

    def wait(self, request: int) -> None:
        """Return when this request and all earlier ones have been answered."""
        # Noted before waiting: afterwards no loader would be behind, and loaders learn of it with the next request.
        for answer in self._answers:
            if answer.number <= request:
                self._waited |= answer.loaders_behind()
        self._receive(lambda: bool(self._answers) and self._answers[0].number <= request)

    def answered(self) -> int:
        """Return how many requests, from the first, have been answered."""
        while self._answers and not self._answers[0].loaders_behind():
            self._answers.popleft()
        return self._answers[0].number if self._answers else self._requests

    def close(self, stopped: bool) -> None:
        """Say goodbye to the loaders, receive what was requested, and then their reports."""
        # After all requests: messages of one pair arrive in order, so the loader knows then that none will follow.
        self._send({loader: {"kind": "goodbye", "stopped": stopped} for loader in self._loaders})
        # Loaders report when they have sent all that was requested, blank or not.
        self._receive(lambda: bool(self._answers))
        for pending in self._sends:
            pending.wait()
        backoff = Backoff()
        while len(self.reports) < len(self._loaders):
            received = self._comm.poll_object(REPORT_TAG)
            if received is not None:
                self.reports[received[0]] = received[1]
            else:
                self._check_signals()
                backoff.pause()

    def _receive(self, unfinished: Callable[[], bool]) -> None:
        """Wait until the oldest answers are complete, one after the other, as long as ``unfinished()``."""
        # Shorter pauses than the loader's: the trainer, and with it all ranks of its step, stand still meanwhile.
        backoff = Backoff(first_s=1e-4, max_s=2e-3)
        while unfinished():
            if self._answers[0].loaders_behind():
                self._check_signals()
                backoff.pause()
            else:
                self._answers.popleft()
                backoff.reset()

    def _send(self, messages: Mapping[int, Mapping[str, Any]]) -> None:
        """Send a control message to each loader (the key)."""
        # Testing also makes MPI progress on them; those that have left are forgotten.
        self._sends = [pending for pending in self._sends if not pending.test()]
        self._sends += [self._comm.send_object(value, loader, CONTROL_TAG) for loader, value in messages.items()]
