"""Stopping on request: a signal is remembered, the ranks agree on it between two steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyfi_core.comm.base import Communicator

STOP_TAG = 120


class StopFlag:
    """One rank's knowledge of whether the run was asked to stop, on whichever rank the request arrived.

    Args:
        requested: whether this process was asked to (see :func:`workflows.signals.requested`).

    Attributes:
        wanted: set where the request came by other ways.
    """

    def __init__(self, requested: Callable[[], bool] = lambda: False) -> None:
        self.wanted = False
        self._requested = requested
        self._passed_on = False

    def pass_on(self, world: Communicator) -> None:
        """Forward a request from a loader or validator to trainer 0, once."""
        if self.here() and not self._passed_on:
            self._passed_on = True
            world.send_object("stop", 0, STOP_TAG)

    def here(self) -> bool:
        """Return whether a stop was requested of this rank."""
        return self.wanted or self._requested()

    def anywhere(self, ranks: Communicator) -> bool:
        """Return whether a stop was requested of any of ``ranks``, the same on all of them (collective)."""
        return _any(ranks, self.here())

    def agreed(self, world: Communicator, trainers: Communicator) -> bool:
        """Return whether any rank wants to stop; the same on every trainer (collective over them)."""
        return _any(trainers, self.asked(world))

    def asked(self, world: Communicator) -> bool:
        """Return whether a stop was requested here; on trainer 0, which others inform, whether it was anywhere."""
        if world.rank == 0 and world.poll_object(STOP_TAG) is not None:
            self.wanted = True
        return self.here()


def _any(ranks: Communicator, mine: bool) -> bool:
    vote = torch.tensor([int(mine)])
    ranks.all_reduce(vote, "max")
    return bool(vote.item())
