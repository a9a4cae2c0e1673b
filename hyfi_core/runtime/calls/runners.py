"""The runners of one process: one for its rank, or one for each of its cells, which take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt
from typing import TypeVar, overload

from hyfi_core.cells.baton import Baton, Lockstep
from hyfi_core.cells.communicator import cell_communicators, tag_of_cells
from hyfi_core.cells.paging import Paging
from hyfi_core.comm.base import Communicator
from hyfi_core.current_device import as_in_this_thread
from hyfi_core.errors import RequestError
from hyfi_core.plan.batch_shapes import BatchShapes
from hyfi_core.plan.input_part import InputPart
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.runner import StageRunner
from hyfi_core.runtime.subject import Subject

T = TypeVar("T")


class Runners(Sequence[StageRunner]):
    """The runners of this process; created on all ranks together.

    Args:
        subject: the model.
        plan: plan of the run.
        comm: all ranks of the plan.
        groups: its groups.

    Attributes:
        cells: number of cells that take turns; 1 without cells.
        paging: paging of their maps; None if they are not spilled.
        groups: groups of each cell; empty without cells, since the runner then uses the rank's groups.

    Raises:
        RequestError: the communicator has no tags, which cells need, or too few for so many cells.
    """

    def __init__(self, subject: Subject, plan: ParallelPlan, comm: Communicator, groups: Groups) -> None:
        self.cells = 1
        self.paging: Paging | None = None
        self.groups: list[Groups] = []
        self._baton: Baton | None = None
        if plan.cell_grid is None:
            self._runners = [StageRunner(subject, plan, comm, groups)]
            return
        if comm.size > 1 and comm.in_order:
            raise RequestError(
                f"plan.cells is {plan.cells} on {comm.size} ranks, but cells need messages with tags, which NCCL "
                f"does not have; use one rank, or plan.cells=null"
            )
        self.cells = plan.cell_grid[0] * plan.cell_grid[1]
        if comm.size > 1 and tag_of_cells(self.cells - 1, self.cells - 1, self.cells) > comm.largest_tag:
            raise RequestError(
                f"plan.cells is {plan.cells}: {self.cells} cells on each of {comm.size} ranks exchange messages with "
                f"tags up to {self.cells**2 - 1}, but those of this communication library end at {comm.largest_tag}; "
                f"use at most {isqrt(comm.largest_tag + 1)} cells a rank, with more ranks in plan.grids, or one rank"
            )
        if plan.spill is not None:
            # The pager asks the baton which cell runs, and the baton calls the pager: ``baton`` is assigned below.
            self.paging = Paging(plan.spill, plan.memory_bytes, subject.device, lambda: baton.cell)
        pager = None if self.paging is None else self.paging.pager
        resumed = pager.resume if pager is not None else lambda cell: None
        baton = self._baton = Baton(self.cells, resumed, lambda: as_in_this_thread(subject.device))
        members = [(rank, cell) for rank in range(plan.ranks) for cell in range(self.cells)]
        comms = cell_communicators(comm, baton, members, spills=pager is not None)
        lockstep = Lockstep(baton)
        self._runners = baton.run(
            lambda cell: StageRunner(subject, plan, comms[cell], lockstep=lockstep, pager=pager, updates=cell == 0)
        )
        self.groups = [runner.groups for runner in self._runners]

    def each(self, call: Callable[[StageRunner], T]) -> list[T]:
        """Return ``call(runner)`` for each runner; cells run in turn, their tapes in lockstep."""
        if self._baton is None:
            return [call(self._runners[0])]
        return self._baton.run(lambda cell: call(self._runners[cell]))

    def training_parts(self, shapes: BatchShapes) -> tuple[InputPart, ...]:
        """Return the boxes and samples that this process reads of a batch in training, without duplicates."""
        parts = self.each(lambda runner: runner.training_parts(shapes.micro, shapes.whole[0]).values())
        return tuple(dict.fromkeys(part for stage_parts in parts for part in stage_parts))

    @overload
    def __getitem__(self, index: int) -> StageRunner: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StageRunner]: ...

    def __getitem__(self, index: int | slice) -> StageRunner | Sequence[StageRunner]:
        """Return a runner."""
        return self._runners[index]

    def __len__(self) -> int:
        """Return the number of runners."""
        return len(self._runners)
