"""Forecast of how far the resident memory of each rank grows in training, on a CPU: what it needs, and what it keeps.

    needed    weights, all gradients, moments, maps                                      ``cost.memory.forecast``
    kept      holes of the heap, gaps between huge pages, buffers of messages, the program

glibc's heap keeps freed blocks of up to 32 MB; between gradients and maps that live for different times holes remain,
so that gradients find no room where maps have been. Returning every block at once would take 1.1 to 1.6 times as long
a step (measured at 256 px).

PyTorch lets tensors of 2 MiB or more begin at huge pages. One of exactly 4 MiB, as maps of a power of two are, takes
three with what the heap writes before it:

    pages      │          │          │          │          │
    tensors    ▒██████████████████████          ▒████████████     gaps; smaller tensors take a part
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from hyfi_core.capture.program import Program
from hyfi_core.capture.stages import Stage, cut_program
from hyfi_core.cost.memory.lifetimes import Lifetimes
from hyfi_core.cost.operators import value_bytes
from hyfi_core.plan.parallel_plan import BUCKET_BYTES, ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.in_flight import microbatches_in_flight

HEAP_BLOCK_BYTES = 32 << 20
"""Larger blocks are returned at once (``M_MMAP_THRESHOLD`` of mallopt(3), which grows up to this)."""
HUGE_PAGE_BYTES = 2 << 20
_HOLES, _HOLES_OF_ONE_PASS = 0.25, 0.15
"""Holes of the heap, relative to the maps in it; fewer where it is emptied between a backward and the next forward."""
_GAPS_OF_MAPS, _GAPS_OF_WEIGHTS = 0.3, 1.8
"""How much remains of the gaps: of those after maps, and after one of the three or four copies of the weights."""
_OPERATOR_BYTES = 75_000
"""Captured program and its instructions, for each operator."""


def kept_bytes(program: Program, plan: ParallelPlan, maps_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes that each rank of a plane keeps in addition to what it needs.

    Holes of the heap, gaps before tensors that begin at huge pages, buffers of messages, and the captured program.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
        maps_bytes: bytes of maps that each rank of a plane needs.
    """
    pieces = cut_program(program, program.outputs, () if plan.cuts == "auto" else plan.cuts)
    placement, lifetimes = Placement.of(plan), Lifetimes(program)
    parts = [_KeptMaps.of(program, plan, lifetimes, stage, piece) for stage, piece in enumerate(pieces)]
    totals = []
    for rank in range(placement.size):
        hosted = [stage for stage, _ in placement.hosted(rank)]
        largest = max((value_bytes(program, n) for s in hosted for n in pieces[s].program.parameters), default=0)
        share = _HOLES_OF_ONE_PASS if _is_one_pass(plan, hosted) else _HOLES
        # The share of maps that are small enough for the heap: larger ones leave no holes.
        in_heap = sum(parts[s].in_heap for s in hosted) / max(1, sum(parts[s].maps for s in hosted))
        of_maps = _GAPS_OF_MAPS * sum(parts[s].gaps for s in hosted) + share * in_heap * maps_bytes[rank]
        of_weights = _GAPS_OF_WEIGHTS * sum(parts[s].gaps_of_weights for s in hosted)
        messages = 2 * max(BUCKET_BYTES, largest) if plan.ranks > 1 else 0  # as much was measured without reductions
        messages += sum(_between_bytes(pieces[s]) // prod(placement.grids[s]) for s in hosted)
        operators_bytes = len(program.operators) * _OPERATOR_BYTES
        totals.append(int(operators_bytes + messages + of_weights + of_maps / plan.branches))
    return tuple(totals)


def _is_one_pass(plan: ParallelPlan, hosted: Sequence[int]) -> bool:
    """Whether a step is one forward and backward on a rank with all stages, and its gradients are in buckets."""
    hosts_all = len({*hosted}) == plan.stages and plan.microbatches == plan.directions
    return hosts_all and plan.ranks > 1 and plan.branches == 1 and plan.cell_grid is None


def gaps_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that tensors of the given sizes leave unused up to the next huge page."""
    # Below 2 MiB, tensors do not begin at huge pages; from 32 MB on, they are mapped for themselves.
    large = (size for size in sizes if HUGE_PAGE_BYTES <= size < HEAP_BLOCK_BYTES)
    return sum(HUGE_PAGE_BYTES - size % HUGE_PAGE_BYTES for size in large)


class _KeptMaps(NamedTuple):
    """What a stage keeps on one rank, in bytes.

    Attributes:
        maps: maps of all micro-batches in flight.
        in_heap: the maps below ``HEAP_BLOCK_BYTES``, which the heap holds.
        gaps: gaps between maps and the next huge page.
        gaps_of_weights: the same for one copy of the weights.
    """

    maps: int
    in_heap: int
    gaps: int
    gaps_of_weights: int

    @classmethod
    def of(cls, program: Program, plan: ParallelPlan, lifetimes: Lifetimes, stage: int, piece: Stage) -> _KeptMaps:
        """Return the bytes that a rank of the plan keeps for a stage; ``piece``: the stage's part of the program."""
        saved = {name: size for op in piece.program.operators for name, size in lifetimes.of(op).kept.items()}
        cells, ranks = prod(plan.cell_grid or (1, 1)), prod(plan.grids[stage % len(plan.grids)])
        # Recomputation keeps the maps of one micro-batch at a time, unless the backward is divided.
        is_one_at_a_time = plan.recomputes(stage) and not plan.divides_backwards
        times = cells * (1 if is_one_at_a_time else microbatches_in_flight(plan, stage))
        sizes = [size // ranks // cells for size in saved.values()]  # of a cell's part of each map
        in_heap = sum(size for size in sizes if size < HEAP_BLOCK_BYTES)
        return cls(
            maps=times * sum(sizes),
            in_heap=times * in_heap,
            gaps=times * gaps_bytes(sizes),
            gaps_of_weights=gaps_bytes(value_bytes(program, name) for name in piece.program.parameters),
        )


def _between_bytes(piece: Stage) -> int:
    """Return the bytes of the buffers of messages to and from other stages, which are kept between steps.

    Several values that leave together need two buffers: they are packed into one, and the receive of their cotangents
    is posted before they have been sent. Values that arrive need one: they are copied out of it, and later their
    cotangents are packed into it.
    """
    sent = sum((1 + (len(names) > 1)) * _bytes_of(piece, names) for names in piece.exits.values())
    return sent + sum(_bytes_of(piece, names) for names in piece.entries.values())


def _bytes_of(piece: Stage, names: Sequence[str]) -> int:
    return sum(value_bytes(piece.program, name) for name in names)
