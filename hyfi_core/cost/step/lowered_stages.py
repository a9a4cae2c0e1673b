"""The stages of a plan, each lowered for one rank: times, memory and bytes of a plan are computed from these."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.capture.stages import ProgramCutter, Stage, active_values, edges
from hyfi_core.cost.branch_packing import divide_stage
from hyfi_core.cost.fused_depth import runs_and_trial
from hyfi_core.cost.links.node_links import Messages
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.operators import KnownCosts
from hyfi_core.cost.step.whole_layouts import WholeLayouts
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import NOT_FUSED, Target, lower, lowered_operators
from hyfi_core.lowering.planes import Plane, exchanges, on_plane
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.lowering.stage_values import SplitsByName, boundary, entries_of
from hyfi_core.ops.boundary import BoundaryTransfer
from hyfi_core.ops.plane_exchange import PlaneExchange
from hyfi_core.plan.branches import Branches
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.rules.instructions import RankProgram

Derived = TypeVar("Derived")


@dataclass(frozen=True)
class LoweredStages:
    """What the cost of a plan is computed from; it does not depend on schedule, replicas and recomputation.

    Attributes:
        each: for each stage, (stage, program of the rank in the middle of its grid in plane 0, operators).
        between: (sending stage, receiving stage) -> the transfer of values between them.
        carried: (sending stage, receiving stage) -> for each rank that receives, its ``Messages``.
        divided: each stage as it is divided among planes.
    """

    each: tuple[tuple[Stage, RankProgram, list[Operator]], ...]
    between: Mapping[tuple[int, int], BoundaryTransfer]
    carried: Mapping[tuple[int, int], tuple[Messages, ...]]
    divided: tuple[DividedStage, ...]


@dataclass(frozen=True)
class DividedStage:
    """A lowered stage whose planes compute different branches.

    Attributes:
        branches: which plane computes what.
        planes: for each plane, the program of the rank in the middle of the grid.
        exchanges: the exchanges between planes, in order.
    """

    branches: Branches
    planes: tuple[RankProgram, ...]
    exchanges: tuple[PlaneExchange, ...]


class PartlyLowered:
    """The stages of a plan, lowered on demand: the first may already show that the plan is too slow.

    Args:
        program: the captured model, of one micro-batch.
        fine: the plan, with cells as ranks.
        machine: the machine model that chooses the lengths of fused runs.
        lowered_plans: stages that other plans have lowered; those of this one are added.

    Attributes:
        active: values that carry gradients.

    Raises:
        RequestError: the program cannot be cut so.
    """

    def __init__(
        self, program: Program, fine: ParallelPlan, machine: MachineModel, lowered_plans: LoweredPlans
    ) -> None:
        assert fine.cuts != "auto" or fine.stages == 1, "cuts must be resolved first"
        # ``fine``: cells take the place of ranks.
        self._program, self._fine, self._machine, self._cache = program, fine, machine, lowered_plans
        self._stages = lowered_plans.cutter(program).cut(() if fine.cuts == "auto" else fine.cuts)
        self.active = lowered_plans.active(program)
        # Of each stage that has been lowered, in order: how its values are split, how those are that it receives, its
        # program and operators, and what each plane computes of it.
        self._splits: list[SplitsByName] = []
        self._entries: list[Mapping[str, Any]] = []
        self._lowered: list[tuple[Stage, RankProgram, list[Operator]]] = []
        self._divided: list[DividedStage] = []
        self._whole: LoweredStages | None = None  # once all stages have been lowered

    def stage(self, index: int) -> tuple[Stage, DividedStage, list[Operator]]:
        """Return (stage, the stage after lowering, its operators): it and the stages before it are lowered, once.

        Plans with the same stage share these objects.

        Raises:
            RequestError: the stage cannot be lowered.
        """
        grids = self._fine.grids * self._fine.interleave  # one of each stage
        # In order: the layouts of a stage depend on those of the values that it receives from earlier stages.
        while len(self._lowered) <= index:
            at = len(self._lowered)
            stage, entries = self._stages[at], entries_of(self._stages[at], self._splits, grids[at])
            divided, operators = self._cache.stage(
                (self._program, stage, grids[at], entries, self._fine),
                partial(
                    _lower_stage,
                    stage,
                    grids[at],
                    entries,
                    self._fine,
                    self._machine,
                    self.active,
                    partial(self._cache.layouts, self._program),
                ),
            )
            self._entries.append(entries)
            self._splits.append(divided.planes[0].splits)  # those of all planes
            self._divided.append(divided)
            self._lowered.append((stage, divided.planes[0], operators))
        stage, _, operators = self._lowered[index]
        return stage, self._divided[index], operators

    def whole(self) -> LoweredStages:
        """Return all stages, and the transfers between them.

        Raises:
            RequestError: a stage cannot be lowered, or no stage has branches for the plan's planes.
        """
        if self._whole is None:
            self.stage(len(self._stages) - 1)
            pieces, grids, splits = self._stages, self._fine.grids * self._fine.interleave, self._splits
            between = {
                (a, b): boundary(
                    pieces[a],
                    target=b,
                    have=splits[a],
                    need=self._entries[b],
                    grids=(grids[a], grids[b]),
                    active=self.active,
                    channels_last=False,
                )
                for a, b in edges(pieces)
            }
            carried = {edge: _carried(transfer) for edge, transfer in between.items()}
            if self._fine.branches > 1 and not any(stage.branches.owners for stage in self._divided):
                raise RequestError(
                    f"plan.branches is {self._fine.branches}, but the model has no parallel branches that pay; use 1"
                )
            self._whole = LoweredStages(tuple(self._lowered), between, carried, tuple(self._divided))
        return self._whole


class LoweredPlans:
    """Cache of lowered stages for one machine model: plans with the same stage lower it once.

    Two plans have the same stage if they cut the same operators out of the same program, for the same grid and with the
    same layouts of the values from other stages: replicas, schedules, and cuts elsewhere do not matter.
    """

    def __init__(self) -> None:
        # Keys contain the ``id`` of a program or a stage. Values keep that object alive: no other one gets its ``id``.
        self._plans: dict[Hashable, PartlyLowered] = {}
        self._stages: dict[Hashable, tuple[DividedStage, list[Operator]]] = {}
        # By the id of a program: values that carry gradients, and what cuts it into stages.
        self._active: dict[int, tuple[Program, frozenset[str]]] = {}
        self._cutters: dict[int, tuple[Program, ProgramCutter]] = {}
        # By the id of a program and autocast's dtype: costs of operators.
        self._costs: dict[tuple[int, str | None], tuple[Program, KnownCosts]] = {}
        # By the id of a stage and what was computed: results that callers have computed from it.
        self._derived: dict[Hashable, tuple[DividedStage, Any]] = {}
        # By the id of a program, the grid, and the bytes of maps that are gathered: None if it cannot be lowered so.
        self._layouts: dict[tuple[int, tuple[int, int], int], tuple[Program, WholeLayouts | None]] = {}

    def clear(self) -> None:
        """Forget everything now: plans and this cache refer to each other, so Python would free them much later."""
        for cache in (
            self._plans,
            self._stages,
            self._active,
            self._cutters,
            self._costs,
            self._derived,
            self._layouts,
        ):
            cache.clear()

    def layouts(self, program: Program, target: Target) -> WholeLayouts | None:
        """Return the layouts of a whole model on the target's grid; None if it cannot be lowered for the grid.

        Cached. Layouts of the program for another micro-batch size are used again where they hold for this one.
        """
        key = id(program), target.grid, target.gather_bytes
        if key not in self._layouts:
            on_this_grid = (whole for other, (_, whole) in self._layouts.items() if other[1:] == key[1:])
            reused = next((whole for whole in on_this_grid if whole is not None and whole.serve(program)), None)
            self._layouts[key] = program, reused or WholeLayouts.of(program, target)
        _, layouts = self._layouts[key]
        return layouts

    def derived(self, stage: DividedStage, way: Hashable, compute: Callable[[], Derived]) -> Derived:
        """Return the result of ``compute`` for a stage, cached by ``way``; callers must not change it."""
        key = id(stage), way
        if key not in self._derived:
            _make_room(self._derived, _MOST_STAGES)
            self._derived[key] = stage, compute()  # keeps the stage alive, so no other object gets its ``id``
        result: Derived = self._derived[key][1]
        return result

    def active(self, program: Program) -> frozenset[str]:
        """Return the values of a model that carry gradients; cached."""
        if id(program) not in self._active:
            self._active[id(program)] = program, active_values(program, program.outputs, program.parameters)
        return self._active[id(program)][1]

    def costs(self, program: Program, dtype: str | None) -> KnownCosts:
        """Return the cache of costs of a model's operators under autocast to ``dtype``."""
        return self._costs.setdefault((id(program), dtype), (program, {}))[1]

    def cutter(self, program: Program) -> ProgramCutter:
        """Return the cutter of a model; cached."""
        if id(program) not in self._cutters:
            self._cutters[id(program)] = program, ProgramCutter(program, program.outputs)
        return self._cutters[id(program)][1]

    def plan(self, program: Program, plan: ParallelPlan, fine: ParallelPlan, machine: MachineModel) -> PartlyLowered:
        """Return the stages of a plan, cached; arguments as for ``lowered_stages``."""
        divided = plan.cells, plan.branches
        key = (id(program), plan.grids, plan.cuts, plan.interleave, plan.fused_halo, plan.gather_bytes, divided)
        if key not in self._plans:
            _make_room(self._plans, _MOST_PLANS)
            self._plans[key] = PartlyLowered(program, fine, machine, self)
        return self._plans[key]

    def stage(
        self,
        identity: tuple[Program, Stage, tuple[int, int], Mapping[str, Any], ParallelPlan],
        lowered: Callable[[], tuple[DividedStage, list[Operator]]],
    ) -> tuple[DividedStage, list[Operator]]:
        """Return a stage that was lowered before, or lower it.

        Args:
            identity: (the whole program, the stage, its grid, how values of other stages are split, the plan).
            lowered: lowers the stage.
        """
        program, piece, grid, entries, fine = identity
        operators = tuple(op.name for op in piece.program.operators)
        settings = fine.branches, fine.fused_halo, fine.gather_bytes
        key = (id(program), operators, piece.sent, bool(piece.outputs), grid, tuple(entries.items()), settings)
        if key not in self._stages:
            _make_room(self._stages, _MOST_STAGES)
            self._stages[key] = lowered()
        return self._stages[key]


_MOST_PLANS = 64
_MOST_STAGES = 256


def _make_room(cache: dict[Hashable, Any], most: int) -> None:
    """Drop the oldest entries until the cache has fewer than ``most``."""
    while len(cache) >= most:
        cache.pop(next(iter(cache)))


def lowered_stages(
    program: Program, plan: ParallelPlan, fine: ParallelPlan, machine: MachineModel, lowered_plans: LoweredPlans
) -> PartlyLowered:
    """Return the stages of a plan, which are lowered when they are asked for.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts.
        fine: the same plan with cells as ranks.
        machine: the machine model that chooses the lengths of fused runs.
        lowered_plans: lowered plans of earlier calls with the same machine; this one is added.

    Raises:
        RequestError: the program cannot be cut so.
    """
    return lowered_plans.plan(program, plan, fine, machine)


def middle_rank(grid: tuple[int, int]) -> int:
    """Return the rank in the middle of a grid, which has the most neighbours; stages are lowered for it."""
    return grid[0] // 2 * grid[1] + grid[1] // 2


def _lower_stage(
    piece: Stage,
    grid: tuple[int, int],
    entries: Mapping[str, Any],
    fine: ParallelPlan,
    machine: MachineModel,
    active: frozenset[str],
    layouts: Callable[[Target], WholeLayouts | None],
) -> tuple[DividedStage, list[Operator]]:
    """Lower a stage for the rank in the middle of a grid, in all planes; return (lowered stage, operators).

    Args:
        piece: the stage.
        grid: rows and columns of ranks.
        entries: how the values that it receives are split.
        fine: the plan, with cells as ranks.
        machine: the machine model that chooses the lengths of fused runs.
        active: values of the whole model that carry gradients.
        layouts: returns the layouts of the whole model on the grid of a target; None if it cannot be lowered for it.
    """
    exits = piece.sent
    program = pool_before_relu(piece.program, (*refs_in(piece.outputs), *exits))
    middle = middle_rank(grid)
    target = Target(grid, middle, entries=entries, gather_bytes=fine.gather_bytes)
    program, branches = divide_stage(program, piece.outputs, exits, fine.branches, grid)
    operators = lowered_operators(program, piece.outputs, exits)
    whole = layouts(target) if grid != (1, 1) and fine.fused_halo != 1 else None
    unfused = whole.ranked if whole is not None and whole.hold_for(operators, entries) else None
    runs, trial = runs_and_trial(program, target, piece.outputs, exits, fine.fused_halo, machine, unfused)
    planes = [Plane(branches, index) for index in range(fine.branches)]
    if trial is not None and runs == NOT_FUSED and not branches.order and fine.branches == 1:
        ranked = trial  # the same that lowering again would return
    else:
        ranked = lower(program, replace(target, plane=planes[0]), piece.outputs, exits, runs)
    # ``ranked`` has the instructions of plane 0; ``of_all_planes`` are those of all planes.
    all_planes = replace(ranked, instructions=ranked.of_all_planes or ranked.instructions, of_all_planes=())
    further = (on_plane(all_planes, plane, middle) for plane in planes[1:])
    sent = tuple(exchange.carrying(active) for exchange in exchanges(ranked, planes[0], middle))
    stage = DividedStage(branches, (ranked, *further), sent)
    return stage, operators


def _carried(transfer: BoundaryTransfer) -> tuple[Messages, ...]:
    """Return, for each rank of the receiving stage, its messages as (rank of the sending stage, bytes)."""
    return tuple(
        tuple((source, float(sum(piece.bytes for piece in pieces))) for source, pieces in incoming.items())
        for incoming in map(transfer.incoming, range(transfer.targets))
    )
