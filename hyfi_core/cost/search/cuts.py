"""Automatic cuts: minimise the time of the slowest stage, within the memory of every rank.

    operators    ▁▁▃▃▇▇▇▅▅▅▅▃▃▃▃▂▂▂▁        modelled time of each
    grids 2x2 │ 1x1 │ 1x1                   a stage's time is that of its operators over its ranks,
    stages    ├──────┼─────────┼────┤       plus that of the values sent at its end

Pieces that one rank computes one after the other have cuts of their own: see ``cost.search.piece_cuts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.memory.forecast import STATE_COPIES
from hyfi_core.cost.operators import operator_costs, value_bytes
from hyfi_core.cost.search.cut_candidates import cut_candidates
from hyfi_core.cost.search.piece_cuts import least_memory_cuts, recomputes_in_pieces
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.in_flight import microbatches_in_flight


@dataclass(frozen=True)
class _Measured:
    """Where a program can be cut, and cumulative sums over its operators: item n is the sum of the first n operators.

    Attributes:
        names: the module that ends at each place but the first and the last.
        places: positions between operators at which a stage may begin or end.
        crossing: bytes of the live values at each place.
        seconds: sums of the modelled seconds of a forward on one rank.
        made: sums of the bytes of results.
        weights: sums of the bytes of parameters, each with the first operator that uses it.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    crossing: tuple[int, ...]
    seconds: list[float]
    made: list[float]
    weights: list[float]

    @classmethod
    def of(cls, program: Program, machine: MachineModel) -> _Measured:
        """Return where a captured model can be cut, and the sums over its first operators."""
        candidates, costs = cut_candidates(program), operator_costs(program, machine)
        return cls(
            names=tuple(candidate.module for candidate in candidates),
            places=(0, *(candidate.index for candidate in candidates), len(program.operators)),
            crossing=(0, *(candidate.crossing_bytes for candidate in candidates), 0),
            seconds=_sums([cost.seconds for cost in costs]),
            made=_sums([cost.output_bytes for cost in costs]),
            weights=_sums(_weight_bytes(program)),
        )


MeasuredPrograms = dict[int, _Measured]
"""``id`` of a program -> its places and sums, which many plans share; the owner keeps the programs alive."""


def with_cuts(
    plan: ParallelPlan,
    program: Program,
    machine: MachineModel | None = None,
    cache: MeasuredPrograms | None = None,
) -> ParallelPlan:
    """Return the plan with ``cuts="auto"`` replaced by names of modules.

    Args:
        plan: any; returned unchanged if its cuts are named.
        program: the captured model, of one micro-batch.
        machine: the machine model; None: the reference machine.
        cache: results of earlier calls with the same machine; that of this program is added.

    Raises:
        RequestError: the model has too few modules for the stages, or no cut fits into ``plan.memory_bytes``.
    """
    if plan.cuts != "auto" or plan.stages == 1:
        return plan
    machine = machine or reference_machine()
    cache = {} if cache is None else cache
    if id(program) not in cache:
        cache[id(program)] = _Measured.of(program, machine)
    measured = cache[id(program)]
    if recomputes_in_pieces(plan) and len(measured.names) >= plan.stages - 1:
        return replace(plan, cuts=least_memory_cuts(plan, program))
    if len(measured.names) < plan.stages - 1:
        raise RequestError(
            f"plan.grids has {plan.stages} stages, but the model can be cut after {len(measured.names)} modules only; "
            f"use at most {len(measured.names) + 1} stages"
        )
    return replace(plan, cuts=_Search(plan, measured, machine).best())


class _Search:
    """Dynamic programming over stages: best[j] is the least time of the slowest stage so far, if it ends at place j."""

    def __init__(self, plan: ParallelPlan, measured: _Measured, machine: MachineModel) -> None:
        self._plan, self._machine = plan, machine
        self._names, self._places, self._crossing = measured.names, measured.places, measured.crossing
        self._seconds, self._made, self._weights = measured.seconds, measured.made, measured.weights
        self._ranks = [rows * columns for rows, columns in Placement.of(plan).grids]
        self._in_flight = [microbatches_in_flight(plan, stage) for stage in range(plan.stages)]

    def best(self) -> tuple[str, ...]:
        """Return the modules after which to cut.

        Raises:
            RequestError: no cut fits into ``plan.memory_bytes``.
        """
        stages, places = self._plan.stages, len(self._places)
        best = [0.0 if end == 0 else float("inf") for end in range(places)]
        choices: list[list[int]] = []
        for stage in range(stages):
            # For each place where this stage may end: ``best`` including this stage, and where this stage then begins.
            row, choice = [float("inf")] * places, [0] * places
            for end in range(stage + 1, places - (stages - 1 - stage)):
                for start in range(end - 1, stage - 1, -1):  # from the shortest stage to the longest
                    own_s = self._stage_s(stage, start, end)
                    # A longer stage takes longer, so stop. But go on after a stage that does not fit (infinite): with
                    # recomputation, it may need less if it begins earlier, where fewer values cross.
                    if row[end] <= own_s < float("inf"):
                        break
                    if max(best[start], own_s) < row[end]:
                        row[end], choice[end] = max(best[start], own_s), start
            best = row
            choices.append(choice)
        if best[-1] == float("inf"):
            raise RequestError(self._no_room())
        cut, cuts = places - 1, []
        # The first stage begins at 0, whatever its choice.
        for choice in reversed(choices[1:]):
            cut = choice[cut]
            cuts.append(self._names[cut - 1])
        return tuple(reversed(cuts))

    def _stage_s(self, stage: int, start: int, end: int) -> float:
        """Return the seconds of a stage between two places and its message at the end; infinite if it does not fit."""
        if self._plan.memory_bytes is not None and self._stage_bytes(stage, start, end) > self._plan.memory_bytes:
            return float("inf")
        compute = self._between(self._seconds, start, end) / self._ranks[stage]
        return compute + self._crossing[end] / self._ranks[stage] / self._machine.node.bytes_per_s

    def _stage_bytes(self, stage: int, start: int, end: int) -> float:
        """Return the bytes of a rank of a stage: all copies of weights, activations of all micro-batches in flight."""
        activations = self._between(self._made, start, end) / self._ranks[stage]
        if self._plan.recomputes(stage):
            activations += self._crossing[start] / self._ranks[stage] * self._in_flight[stage]
        else:
            activations *= self._in_flight[stage]
        return (1 + STATE_COPIES) * self._between(self._weights, start, end) + activations

    def _between(self, sums: Sequence[float], start: int, end: int) -> float:
        """Return the sum over the operators between two places; ``sums`` are cumulative."""
        return sums[self._places[end]] - sums[self._places[start]]

    def _no_room(self) -> str:
        """Return the message that no choice of cuts fits the memory."""
        largest_bytes = max(
            min(self._stage_bytes(stage, start, start + 1) for stage in range(self._plan.stages))
            for start in range(len(self._places) - 1)
        )
        return (
            f"plan.memory_bytes is {self._plan.memory_bytes:,}, and no choice of cuts into {self._plan.stages} "
            f"stages fits; the largest module alone needs {largest_bytes:,.0f}: use more ranks in its stage, "
            f"plan.recompute, or more micro-batches"
        )


def _sums(items: Sequence[float]) -> list[float]:
    """Return the sums of the first 0, 1, 2 … items."""
    return list(accumulate(items, initial=0.0))


def _weight_bytes(program: Program) -> list[float]:
    """Return, for each operator, the bytes of the parameters that no earlier operator uses."""
    counted: set[str] = set()
    sizes = []
    for op in program.operators:
        first_used = [name for name in op.inputs if name in program.parameters and name not in counted]
        counted.update(first_used)
        sizes.append(float(sum(value_bytes(program, name) for name in first_used)))
    return sizes
