"""Forecast of how far the resident memory of each rank grows in training, on a CPU: what it needs, and what it keeps.

    needed    weights, gradients, moments, saved maps, the largest operator        ``cost.memory``
    kept      holes of the heap, weights in the kernels' order, indices of pools, buffers of messages, the program

glibc's heap keeps freed blocks of up to 32 MB; between gradients and maps that live for different times holes remain.
Returning every block at once would take 1.1 to 1.6 times as long a step (measured at 256 px).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hyfi_core.capture.program import Program
from hyfi_core.capture.stages import Stage, cut_program
from hyfi_core.cost.memory import microbatches_in_flight
from hyfi_core.cost.operators import value_bytes
from hyfi_core.plan.parallel_plan import BUCKET_BYTES, ParallelPlan
from hyfi_core.plan.placement import Placement

HEAP_BLOCK_BYTES = 32 << 20
"""Larger blocks are returned at once (``M_MMAP_THRESHOLD`` of mallopt(3), which grows up to this)."""
_HOLES, _HOLES_OF_ONE_PASS = 0.3, 0.17
"""Holes of the heap, relative to the maps in it: measured 0.25 to 0.4 with ResNets and AmoebaNet, and 0 to 0.3 if a
step of a rank is a single forward and backward of the whole model, after which everything is free."""
_WEIGHT_COPIES = 4
"""Of the operator with the largest weights: these and their gradient, in the kernels' order and in the plain one."""
_OPERATOR_BYTES = 75_000
"""Captured program and its instructions, for each operator."""
_INDEX_BYTES = 8


def kept_bytes(program: Program, plan: ParallelPlan, maps_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return what each rank of a plane keeps, in addition to what it needs.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
        maps_bytes: for each stage, saved maps and those of its largest operator, of one rank.
    """
    pieces = cut_program(program, program.outputs, () if plan.cuts == "auto" else plan.cuts)
    placement = Placement.of(plan)
    cells = prod(plan.cell_grid or (1, 1))
    whole = len(program.operators) * _OPERATOR_BYTES
    found = []
    for rank in range(placement.size):
        hosted = [stage for stage, _ in placement.hosted(rank)]
        largest = max((value_bytes(program, n) for s in hosted for n in pieces[s].program.parameters), default=0)
        pools = sum(_pool_bytes(pieces[s]) * _in_flight(plan, s) // prod(placement.grids[s]) for s in hosted)
        ranks = min(prod(placement.grids[stage]) for stage in hosted) * cells
        small = max((value_bytes(program, name) for name in program.values), default=0) < ranks * HEAP_BLOCK_BYTES
        share = _HOLES_OF_ONE_PASS if _is_one_pass(plan, hosted) else _HOLES
        holes = share * sum(maps_bytes[stage] for stage in hosted) if small else 0.0
        messages = 2 * max(BUCKET_BYTES, largest) if plan.ranks > 1 else 0  # as much was measured without reductions
        messages += sum(_between_bytes(pieces[s]) // prod(placement.grids[s]) for s in hosted)
        found.append(int(whole + _WEIGHT_COPIES * largest + messages + (pools + holes) / plan.branches))
    return tuple(found)


def _is_one_pass(plan: ParallelPlan, hosted: Sequence[int]) -> bool:
    """Whether a rank computes one forward and one backward of each stage in a step, and has all stages."""
    whole = len({*hosted}) == plan.stages * plan.interleave and plan.microbatches == plan.directions
    return whole and plan.cell_grid is None and not any(map(plan.recomputes, hosted))


def _in_flight(plan: ParallelPlan, stage: int) -> int:
    return 1 if plan.recomputes(stage) else microbatches_in_flight(plan, stage)


def _between_bytes(piece: Stage) -> int:
    """Return the buffers of messages to and from other stages, which persist; each is of one micro-batch.

    Several values that leave together are packed, and the receive of their cotangents is posted before they have been
    sent: two buffers. What arrives is copied out of its buffer, into which its cotangents are packed later: one.
    """
    sent = sum((1 + (len(names) > 1)) * _bytes_of(piece, names) for names in piece.exits.values())
    return sent + sum(_bytes_of(piece, names) for names in piece.entries.values())


def _bytes_of(piece: Stage, names: Sequence[str]) -> int:
    return sum(value_bytes(piece.program, name) for name in names)


def _pool_bytes(piece: Stage) -> int:
    """Return the indices of maxima, and the inputs of pools, which their backward takes."""
    program = piece.program
    found: dict[str, int] = {}
    for op in program.operators:
        if "_pool2d" in op.text and "adaptive" not in op.text:
            found |= {name: value_bytes(program, name) for name in op.inputs if name in program.values}
            if "max_pool" in op.text:
                info = program.values[op.first_output]
                found[op.name] = _INDEX_BYTES * prod(info.shape) - value_bytes(program, op.first_output)
    return sum(found.values())
