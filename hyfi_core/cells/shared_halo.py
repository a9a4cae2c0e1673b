"""Halos between the cells of one process in evaluation: each reads its neighbours' parts, and nothing is copied."""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.cells.communicator import CellCommunicator
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.ops.bands import Banded
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.redistribute import PendingStrips, Redistribute
from hyfi_core.rules.instructions import CollectiveCall, Instruction


class SharedHalo(Redistribute):
    """A redistribution between cells that read what others hold; for forwards that nothing is kept of."""

    def start(self, comm: Communicator, own: torch.Tensor) -> PendingStrips:
        """Show the others what they need of ``own``, and return views of what this cell needs of theirs."""
        swap = getattr(comm, CellCommunicator.swap.__name__)  # counting communicators pass it on
        transfer = self.transfer
        shown = [Message(strip.peer, self._view(own, strip.box, transfer.have)) for strip in transfer.sends]
        return PendingStrips(None, tuple(swap(shown, [strip.peer for strip in transfer.receives])))


def with_shared_halo(instruction: Instruction) -> Instruction:
    """Return the instruction with cells that read where ranks would receive."""
    if not isinstance(instruction, CollectiveCall):
        return instruction
    operator = instruction.operator
    if isinstance(operator, Redistribute):
        return replace(instruction, operator=_shared(operator))
    if isinstance(operator, (Convolution, Banded)):
        return replace(instruction, operator=replace(operator, halo=_shared(operator.halo)))
    return instruction


def _shared(halo: Redistribute) -> SharedHalo:
    return SharedHalo(halo.transfer, halo.dims, halo.fill)
