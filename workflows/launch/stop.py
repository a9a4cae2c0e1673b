"""Stopping on request: a process remembers the signal, and the ranks agree on it between two steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyfi_core.comm.base import Communicator

STOP_TAG = 120


class StopFlag:
    """Whether the run was requested to stop, as far as this rank knows.

    Args:
        requested: Whether this process was (see :func:`workflows.signals.requested`).

    Attributes:
        wanted: Set to True for a request that did not come by a signal to this process.
    """

    def __init__(self, requested: Callable[[], bool] = lambda: False) -> None:
        self.wanted = False
        self._requested = requested
        self._forwarded = False

    def forward(self, world: Communicator) -> None:
        """Forward a request from a loader or validator to trainer 0, once."""
        # Once: trainer 0 takes one message at each poll, and one is enough.
        if self.requested_here() and not self._forwarded:
            self._forwarded = True
            world.send_object("stop", 0, STOP_TAG)

    def requested_here(self) -> bool:
        """Return whether a stop was requested on this rank."""
        return self.wanted or self._requested()

    def requested_on_any(self, ranks: Communicator) -> bool:
        """Return whether a stop was requested on any of ``ranks``, the same on all of them (collective)."""
        return _any(ranks, self.requested_here())

    def poll_all(self, world: Communicator, trainers: Communicator) -> bool:
        """Return whether a stop was requested on any rank, the same on all trainers (collective over them)."""
        return _any(trainers, self.poll(world))

    def poll(self, world: Communicator) -> bool:
        """Return whether a stop was requested on this rank; on trainer 0 also whether a request was forwarded to it."""
        # Loaders and validators take no part in the trainers' votes: they send trainer 0 a message.
        if world.rank == 0 and world.poll_object(STOP_TAG) is not None:
            self.wanted = True
        return self.requested_here()


def _any(ranks: Communicator, mine: bool) -> bool:
    vote = torch.tensor([int(mine)])
    ranks.all_reduce(vote, "max")
    return bool(vote.item())
