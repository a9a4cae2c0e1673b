"""Stopping on request: a signal sets a flag, the trainers agree on it between two steps."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from hyfi_core.comm.base import Communicator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOP_TAG = 120


class StopFlag:
    """Set by SIGTERM, SIGUSR1 or Ctrl-C, on whichever rank they reach."""

    def __init__(self) -> None:
        self.wanted = False
        self._passed_on = False

    def listen(self) -> None:
        """Take the signals over from whoever had them; call it before anything slow."""
        for number in SIGNALS:
            signal.signal(number, self._set)

    def pass_on(self, world: Communicator) -> None:
        """Tell trainer 0, once, if the signal came here: what a loader or a validator does with it."""
        if self.wanted and not self._passed_on:
            self._passed_on = True
            world.send_object("stop", 0, STOP_TAG)

    def agreed(self, world: Communicator, trainers: Communicator) -> bool:
        """Return whether any rank wants to stop; the same on every trainer (collective over them)."""
        vote = torch.tensor([int(self.asked(world))])
        trainers.all_reduce(vote, "max")
        return bool(vote.item())

    def asked(self, world: Communicator) -> bool:
        """Return whether a stop was asked for here; on trainer 0, which others tell, whether it was anywhere."""
        if world.rank == 0 and world.poll_object(STOP_TAG) is not None:
            self.wanted = True
        return self.wanted

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
