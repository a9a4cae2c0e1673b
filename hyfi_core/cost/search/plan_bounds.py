"""Lower bounds of the step times of plans, from the operators of a model alone; nothing is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.capture.stages import ProgramCutter, Stage
from hyfi_core.cost.machine import KNOWN_NORM, MachineModel
from hyfi_core.cost.operators import OperatorCost, operator_costs
from hyfi_core.cost.step.stage_cost import update_s
from hyfi_core.lowering.lower import lowered_operators
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.rules.batch_norm import has_live_statistics
from hyfi_core.rules.table import facts_of
from hyfi_core.schedule.in_flight import recomputes

Programs = Callable[[int], Program]
"""A function: number of images of a micro-batch -> the captured model."""
ONE_IN_FLIGHT = ("sequential", "gems_master")
"""Schedules in which each direction has one micro-batch at a time."""
_NO_MAP = (1, 1)


class _Mode(NamedTuple):
    """How a stage computes.

    Attributes:
        shared: whether batch norms compute their statistics over several ranks or cells; None: whichever is faster.
        forwards: number of forwards of each micro-batch: 2 if the stage recomputes.
    """

    shared: bool | None = None
    forwards: int = 1


_LEAST = _Mode()


@dataclass
class _Work:
    """The least time that some operators take for a micro-batch, forward and backward, on one rank.

    Attributes:
        by_map: (height, width) of a map -> seconds of the operators that compute such maps; (1, 1) stands for operators
            without a known map.
        kernels_s: seconds to start the operators, which every rank of a stage does.
    """

    by_map: dict[tuple[int, ...], float] = field(default_factory=dict)
    kernels_s: float = 0.0

    @classmethod
    def sum(cls, parts: Iterable[_Work]) -> _Work:
        """Return the work of several parts together."""
        total = cls()
        for part in parts:
            total.kernels_s += part.kernels_s
            for size, seconds in part.by_map.items():
                total.by_map[size] = total.by_map.get(size, 0.0) + seconds
        return total

    def ranks_s(self, grids: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of all ranks of a grid together, without starting operators; the best of the grids.

        Many ranks cannot divide a small map evenly, and all wait for the largest part, ceil(h/R) x ceil(w/C) of a map
        of h x w on R x C ranks: an operator counts R C ceil(h/R) ceil(w/C) / (h w) times.
        """
        grids = tuple(grids)
        return sum(seconds * min(_repeated(size, grid) for grid in grids) for size, seconds in self.by_map.items())


class _PricedProgram(NamedTuple):
    """A program with the costs of its operators.

    Attributes:
        program: the program.
        each: name of an operator -> its cost, without sums of cotangents.
        sizes: name of a map -> (height, width).
    """

    program: Program
    each: dict[str, OperatorCost]
    sizes: dict[str, tuple[int, ...]]


class PlanBounds:
    """Lower bounds of the step times of plans.

    A micro-batch takes W seconds on one rank; K of them start operators, which every rank of a stage does. With
    m micro-batches and stages of r₀, r₁ … ranks that take t₀, t₁ … seconds for each::

        m tₛ + Σ(j < s) tⱼ ≤ step        for every stage s, in one direction: it begins after those before it and ends
                                         before them; with backwards in two parts, m tₛ ≤ step
        Σ rₛ tₛ ≥ W + min(r) K           the stages do all the work

    The step is at least (W + min(r) K) / Σ yₛ for any yₛ ≥ 0 with m yₛ + Σ(j > s) yⱼ ≥ rₛ. In the sequential schedule
    and with GEMS, each direction begins a micro-batch after the backward of the one before: at least W / max(r) + K for
    each. ``of_stages`` knows where stages end, how many ranks share their norms, and which recompute: it has each tₛ.

    Args:
        programs: captures the model.
        batch: images of a step, over all replicas.
        ranks: number of ranks, of all replicas together.
        machine: the machine model.
        dtype: of convolutions and matrix products under autocast; None: the dtype of their values.
    """

    def __init__(
        self, programs: Programs, batch: int, ranks: int, machine: MachineModel, dtype: str | None = None
    ) -> None:
        self._programs, self._batch = programs, batch
        self._machine, self._dtype = machine, dtype
        # The same machine without the time to start operators, which grids do not divide.
        self._bare = replace(machine, kernel_s=0.0)
        self._crowded = ranks > 1 and machine.devices_per_node > 1
        # Results so far; each key begins with the number of images of a micro-batch.
        self._costs: dict[int, _PricedProgram] = {}
        # For how a stage computes (its mode): the least work of each operator.
        self._operators: dict[tuple[int, _Mode], dict[str, _Work]] = {}
        # The least work of the whole model; for a set of grids, the least seconds of all ranks together.
        self._whole: dict[int, _Work] = {}
        self._totals: dict[tuple[int, frozenset[tuple[int, int]]], float] = {}
        # For the cuts: the stages; with the mode of each, its least work, and the seconds of the optimizer step.
        self._cutters: dict[int, ProgramCutter] = {}
        self._pieces: dict[tuple[int, tuple[str, ...] | str], tuple[Stage, ...]] = {}
        self._stages: dict[tuple[int, tuple[str, ...] | str, tuple[_Mode, ...]], tuple[tuple[_Work, ...], float]] = {}
        # For the mode: the least work between each two places of ``before``.
        self._parts: dict[tuple[int, _Mode], list[_Work]] = {}

    def of(self, plan: ParallelPlan) -> float:
        """Return a lower bound of a plan's step in seconds, whatever its cuts.

        Raises:
            RequestError: its micro-batches cannot be captured.
        """
        sizes = [rows * columns for rows, columns in plan.grids]  # ranks of each stage
        images, grids = self._images(plan), frozenset(_divided(plan))
        # Seconds of a micro-batch: work, which ranks divide, and starting kernels, which every rank of a stage does.
        if (images, grids) not in self._totals:
            self._totals[images, grids] = self._of_microbatch(images).ranks_s(grids)
        work_s, kernels_s = self._totals[images, grids], self._of_microbatch(images).kernels_s
        total_s = work_s + min(sizes) * kernels_s
        if plan.schedule in ONE_IN_FLIGHT:
            return plan.microbatches / plan.directions * (work_s / max(sizes) + kernels_s)
        # Only m tₛ ≤ step holds for m micro-batches that take tₛ in stage s: a stage need not wait for all before it.
        if plan.directions == 2 or plan.divides_backwards:
            return plan.microbatches * total_s / sum(sizes)
        # In one direction, m tₛ + Σ(j < s) tⱼ ≤ step for every stage s. Weighted by yₛ ≥ 0 and added, these conditions
        # give total / Σ yₛ ≤ step if m yₛ + Σ(j > s) yⱼ ≥ size of stage s: from the last, yₛ is the least that does.
        sum_of_y = 0.0
        for size in reversed(sizes):
            sum_of_y += max(0.0, size - sum_of_y) / plan.microbatches
        return total_s / sum_of_y

    def of_stages(self, plan: ParallelPlan) -> tuple[tuple[float, ...], float]:
        """Return (least seconds of a micro-batch in each stage, forward and backward; least of the optimizer step).

        Args:
            plan: with named cuts.

        Raises:
            RequestError: as ``cut_program``.
        """
        images, modes = self._images(plan), _modes(plan)
        key = images, plan.cuts, modes
        if key not in self._stages:
            pieces, works = self.pieces(plan), list[_Work]()
            for piece, mode in zip(pieces, modes, strict=True):
                known = self._of_operators(images, mode)
                works.append(_Work.sum(known[op.name] for op in piece.program.operators if op.name in known))
            self._stages[key] = tuple(works), max(update_s(piece.program, self._machine) for piece in pieces)
        works_of_stages, least_update_s = self._stages[key]
        each = zip(works_of_stages, plan.grids, _divided(plan), strict=True)
        return tuple(work.ranks_s([parts]) / prod(grid) + work.kernels_s for work, grid, parts in each), least_update_s

    def before(self, plan: ParallelPlan, places: Sequence[int]) -> list[list[float]]:
        """Return [stage][place]: the least seconds that all operators before the place would take on the stage's grid.

        Args:
            plan: any; its cuts do not matter.
            places: positions between operators, from the first to the last; always the same ones of a program.
        """
        before, images = [], self._images(plan)
        for mode, grid, divided in zip(_modes(plan), plan.grids, _divided(plan), strict=True):
            if (images, mode) not in self._parts:
                works, names = self._of_operators(images, mode), [op.name for op in self._programs(images).operators]
                each = [_Work.sum(works[name] for name in names[a:b] if name in works) for a, b in pairwise(places)]
                self._parts[images, mode] = each
            parts = self._parts[images, mode]
            seconds = (part.ranks_s([divided]) / prod(grid) + part.kernels_s for part in parts)
            before.append(list(accumulate(seconds, initial=0.0)))
        return before

    def pieces(self, plan: ParallelPlan) -> tuple[Stage, ...]:
        """Return the stages of a plan with named cuts.

        Raises:
            RequestError: as ``cut_program``.
        """
        key = self._images(plan), plan.cuts
        if key not in self._pieces:
            if key[0] not in self._cutters:
                program = self._programs(key[0])
                self._cutters[key[0]] = ProgramCutter(program, program.outputs)
            self._pieces[key] = self._cutters[key[0]].cut(() if plan.cuts == "auto" else plan.cuts)
        return self._pieces[key]

    def _images(self, plan: ParallelPlan) -> int:
        return self._batch // plan.replicas // plan.microbatches

    def _of_microbatch(self, images: int) -> _Work:
        if images not in self._whole:
            self._whole[images] = _Work.sum(self._of_operators(images).values())
        return self._whole[images]

    def _of_operators(self, images: int, mode: _Mode = _LEAST) -> dict[str, _Work]:
        """Return the least work of each operator of a micro-batch."""
        if (images, mode) not in self._operators:
            costs = self._priced(images)
            program = costs.program
            self._operators[images, mode] = {
                op.name: self._least(costs, op, mode) for op in lowered_operators(program, program.outputs, ())
            }
        return self._operators[images, mode]

    def costs_of(self, images: int) -> Mapping[str, OperatorCost]:
        """Return operator -> its cost without sums of cotangents, of a micro-batch of this many images."""
        return self._priced(images).each

    def _priced(self, images: int) -> _PricedProgram:
        """Return the operators of the model for a number of images, with their costs; computed once."""
        if images not in self._costs:
            captured = self._programs(images)
            program = pool_before_relu(captured, refs_in(captured.outputs))  # as far as any plan has it
            costs = operator_costs(program, self._machine, self._dtype)
            # Without sums of cotangents: a stage makes only those of values that it uses several times itself.
            each = {op.name: replace(cost, forks=0) for op, cost in zip(program.operators, costs, strict=True)}
            self._costs[images] = _PricedProgram(program, each, _map_sizes(program, each))
        return self._costs[images]

    def _least(self, costs: _PricedProgram, op: Operator, mode: _Mode) -> _Work:
        """Return the least work of an operator in a stage that computes as ``mode`` says.

        The machine model has seconds for each kind of operator; of several possible kinds, the cheapest counts.
        """
        cost = costs.each[op.name]
        kinds: tuple[str, ...] = (cost.kind,)
        cheaper_again: tuple[str, ...] = ()  # kinds by which a second forward may be priced, too
        if cost.kind == "norm" and has_live_statistics(op):
            # Whether ranks compute the statistics together may not be known yet; a second forward may use the first's.
            kinds = {None: ("norm", "shared_norm"), True: ("shared_norm",), False: ("norm",)}[mode.shared]
            cheaper_again = (KNOWN_NORM,)
        # ``bare_s``: without the time to start kernels.
        bare_s, seconds = (
            min(self._of_kind(cost, machine, kind, (kind, *cheaper_again), mode.forwards) for kind in kinds)
            for machine in (self._bare, self._machine)
        )
        return _Work({costs.sizes.get(op.first_output, _NO_MAP): bare_s}, seconds - bare_s)

    def _of_kind(
        self, cost: OperatorCost, machine: MachineModel, kind: str, again: Iterable[str], forwards: int
    ) -> float:
        """Return the seconds of an operator, forward and backward, and of its second forward if there is one.

        Args:
            cost: the operator's cost.
            machine: the machine model.
            kind: the kind of operator by which it is priced.
            again: kinds by which its second forward may be priced; the fastest counts.
            forwards: number of forwards.
        """
        first, back = (of(machine, 1.0, self._crowded, kind) for of in (cost.forward_s, cost.backward_s))
        again_s = min(cost.forward_s(machine, 1.0, self._crowded, other) for other in again) if forwards > 1 else 0.0
        return first + (forwards - 1) * again_s + back


def _map_sizes(program: Program, costs: Mapping[str, OperatorCost]) -> dict[str, tuple[int, ...]]:
    """Return map -> (height, width), for results of convolutions, and of pools and pointwise operators after them."""
    sizes: dict[str, tuple[int, ...]] = {}
    for op in program.operators:
        name, kind = op.first_output, costs[op.name].kind
        if name not in program.values or len(program.values[name].shape) != 4:
            continue
        size = tuple(program.values[name].shape[-2:])
        input_sizes = {sizes[taken] for taken in op.inputs if taken in sizes}
        pooled = input_sizes and facts_of(op).window is not None
        pointwise = kind in ("norm", "elementwise", "view") and size in input_sizes
        if kind.endswith("convolution") or pooled or pointwise:
            sizes[name] = size
    return sizes


def _modes(plan: ParallelPlan) -> tuple[_Mode, ...]:
    """Return how each stage of a plan computes."""
    cells = prod(plan.cell_grid or (1, 1))
    return tuple(_Mode(prod(grid) * cells > 1, 1 + recomputes(plan, stage)) for stage, grid in enumerate(plan.grids))


def _divided(plan: ParallelPlan) -> tuple[tuple[int, int], ...]:
    """Return the grids into which maps are divided; cells of a rank divide its part, and may do so more evenly."""
    return plan.grids if plan.cells is None else (_NO_MAP,) * len(plan.grids)


@cache  # few maps and grids, many plans
def _repeated(size: tuple[int, ...], grid: tuple[int, int]) -> float:
    """Return (pixels of the largest part x ranks) / pixels of the map; 1 for what is not a map."""
    if size == _NO_MAP or grid == _NO_MAP:
        return 1.0
    either_way = grid, grid[::-1]  # y and x of a map may have been exchanged
    # -(-a // b) rounds up: the side of the largest part.
    return min(prod(n * -(-side // n) / side for side, n in zip(size, ranks, strict=True)) for ranks in either_way)
