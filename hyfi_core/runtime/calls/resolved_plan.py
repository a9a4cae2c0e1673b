"""The plan of a run, with cuts and cells that are "auto" chosen, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.capture.program import Program, refs_in
from hyfi_core.capture.verify import Output
from hyfi_core.cells.budget import held_bytes_on, with_cells
from hyfi_core.cells.large_maps import fewest_cells, warn_of_slow_kernels
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.search.cut_candidates import module_ends
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.lower_model import picked_leaves
from hyfi_core.runtime.subject import Subject


def resolved(
    plan: ParallelPlan, subject: Subject, comm: Communicator, device: torch.device, trains: bool
) -> ParallelPlan:
    """Return the plan with "auto" cuts and cells chosen (collective); on GPUs, rank 0 warns of slow kernels.

    Args:
        plan: any.
        subject: the model, which is captured for the largest micro-batch; to cut it, in evaluation mode, too.
        comm: all ranks.
        device: device of the maps.
        trains: whether there is backward.

    Raises:
        RequestError: the model cannot be captured or cut, or the memory is too small for any number of cells.
    """
    shape = subject.shapes.widest
    if plan.cuts == "auto" and plan.stages > 1:
        plan = with_cuts(plan, _to_cut(subject.program(shape), subject.evaluated(shape), subject.settings.output))
    cells_are_possible = comm.size == 1 or not comm.in_order  # NCCL's messages have no tags
    if plan.cells == "auto":
        captured = subject.program(shape)  # before memory is measured: a capture loads libraries
        fewest = fewest_cells(captured, plan) if device.type == "cuda" and cells_are_possible else 1
        held_bytes = comm.broadcast_object(held_bytes_on(device))
        plan = with_cells(plan, captured, held_bytes, device, trains, fewest=fewest)
    if device.type == "cuda":
        captured = subject.program(shape)  # on every rank, so that all refuse a model that cannot be captured
        if comm.rank == 0:
            warn_of_slow_kernels(captured, plan, cells_are_possible)
    return plan


def _to_cut(program: Program, evaluated: Program | None, output: Output | None) -> Program:
    """Return the part of a program that its output needs; its cuts are limited to those that both programs have.

    Args:
        program: the captured model.
        evaluated: the model captured in evaluation mode, which the plan must cut, too; None: only ``program`` counts.
        output: selects the logits from the model's output.
    """
    program = _computed(program, output)
    if evaluated is None:
        return program
    evaluated = _computed(evaluated, output)
    # Module -> number of operators up to its end, in either program.
    ends, evaluated_ends = module_ends(program), module_ends(evaluated)
    # A cut after the last operator would leave nothing to the last stage.
    names = [name for name in ends if name in evaluated_ends and evaluated_ends[name] < len(evaluated.operators)]
    allowed: list[str] = []
    last = (0, 0)
    for cut, name in sorted(((ends[name], evaluated_ends[name]), name) for name in names):
        # In the same order in both, with operators in between; modules that end together have one cut.
        if cut == last or (cut[0] > last[0] and cut[1] > last[1]):
            allowed.append(name)
            last = cut
    return replace(program, ends=frozenset(allowed))


def _computed(program: Program, output: Output | None) -> Program:
    """Return a program without operators on which neither the selected output nor a buffer depends."""
    results, _ = picked_leaves(program, output)
    alive = program.needed({*refs_in(results), *program.mutations.values()})
    operators = tuple(op for op in program.operators if any(name in alive for name in op.outputs if name is not None))
    return replace(program, operators=operators, outputs=results)
