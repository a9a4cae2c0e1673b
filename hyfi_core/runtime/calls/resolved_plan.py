"""The plan of a run, with cuts and cells that are "auto" chosen, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells.budget import held_bytes_on, with_cells
from hyfi_core.cells.large_maps import fewest_cells, warn_of_slow_kernels
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.plan.parallel_plan import ParallelPlan


def resolved(
    plan: ParallelPlan, program: Callable[[], Program], comm: Communicator, device: torch.device, trains: bool
) -> ParallelPlan:
    """Return the plan with cuts and cells that are "auto" chosen (collective); rank 0 of GPUs warns of slow kernels.

    Args:
        plan: any.
        program: captures the model, for the largest micro-batch.
        comm: all ranks.
        device: of the maps.
        trains: whether there is backward.

    Raises:
        RequestError: the model cannot be captured or cut, or the memory is too small for any number of cells.
    """
    if plan.cuts == "auto" and plan.stages > 1:
        plan = with_cuts(plan, program())
    cells_are_possible = comm.size == 1 or not comm.in_order  # NCCL's messages have no tags
    if plan.cells == "auto":
        captured = program()  # before memory is measured: a capture loads libraries
        fewest = fewest_cells(captured, plan) if device.type == "cuda" and cells_are_possible else 1
        held_bytes = comm.broadcast_object(held_bytes_on(device))
        plan = with_cells(plan, captured, held_bytes, device, trains, fewest=fewest)
    if device.type == "cuda":
        captured = program()  # on every rank, so that all refuse a model that cannot be captured
        if comm.rank == 0:
            warn_of_slow_kernels(captured, plan, cells_are_possible)
    return plan
