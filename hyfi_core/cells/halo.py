"""Halos between the cells of one process.

In evaluation, each cell reads its neighbours' parts without a copy. In training, received halos are kept for backward,
in memory that the pager may spill like any other map, and not in persistent buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import torch

from hyfi_core.cells.communicator import CellCommunicator
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.bands import Banded
from hyfi_core.ops.buffers import Buffers
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.max_pool import MaxPool
from hyfi_core.ops.redistribute import PendingStrips, Redistribute
from hyfi_core.rules.instructions import CollectiveCall, Instruction


class SharedHalo(Redistribute):
    """A redistribution in which cells read each other's tensors without copies; for forwards without backward."""

    def start(self, comm: Communicator, own: torch.Tensor) -> Waits[PendingStrips]:
        """Share views of ``own`` with the other cells, and return views of their strips that this cell needs."""
        swap = getattr(comm, CellCommunicator.swap.__name__)  # counting communicators forward it
        transfer = self.transfer
        shown = [Message(strip.peer, self._view(own, strip.box, transfer.have)) for strip in transfer.sends]
        pending = swap(shown, [strip.peer for strip in transfer.receives])
        yield pending
        return PendingStrips(None, pending.tensors())

    def give_back(self, strips: Iterable[torch.Tensor]) -> None:
        """Do nothing: the strips belong to other cells."""


class FreshHalo(Redistribute):
    """A redistribution whose messages have their own memory, freed with the last reference.

    ``in_turn``: a cell does not compute during its exchange, because it would keep the result while others run.
    """

    in_turn: ClassVar[bool] = True

    @cached_property
    def _buffers(self) -> Buffers:
        return _Fresh()


class _Fresh(Buffers):
    """Allocates new memory each time."""

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def dense(self, view: torch.Tensor) -> torch.Tensor:
        """Return the view itself: cells copy what they send."""
        return view

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: they are freed with the last reference."""


def reading_in_place(instruction: Instruction) -> Instruction:
    """Return the instruction with halos that are read from other cells' tensors in place."""
    return _with_halo(instruction, lambda halo: SharedHalo(halo.transfer, halo.dims, halo.fill))


def for_training(instruction: Instruction) -> Instruction:
    """Return the instruction with messages and inputs of max pools that are freed as early as possible.

    Indices of maxima are not packed into bytes: a pager may recompute them, and the first run of a forward that is
    computed again does not need them.
    """
    # The memory of a ``FreshHalo``'s messages is not kept between steps: it is freed with the last reference.
    changed = _with_halo(instruction, lambda halo: FreshHalo(halo.transfer, halo.dims, halo.fill))
    if isinstance(changed, CollectiveCall) and isinstance(changed.operator, MaxPool):
        return replace(changed, operator=replace(changed.operator, holds_map=False))
    return changed


def _with_halo(instruction: Instruction, derive: Callable[[Redistribute], Redistribute]) -> Instruction:
    """Return an instruction with another redistribution in place of its own; unchanged if it has none."""
    if not isinstance(instruction, CollectiveCall):
        return instruction
    operator = instruction.operator
    if isinstance(operator, Redistribute):
        return replace(instruction, operator=derive(operator))
    if isinstance(operator, (Convolution, Banded)):
        return replace(instruction, operator=replace(operator, halo=derive(operator.halo)))
    return instruction
