"""From a captured model to what one rank, or one cell of it, runs: cut into stages, each of them lowered."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from hyfi_core.capture.program import Operator, Program, Ref, refs_in
from hyfi_core.capture.stages import Stage, active_values, cut_program, edges
from hyfi_core.capture.verify import Output
from hyfi_core.cells.fused_memory import runs_for_cells
from hyfi_core.cells.fused_place import CELL_OPERATORS
from hyfi_core.cells.halo import for_training, reading_in_place
from hyfi_core.comm.agreement.agree import compare
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.branch_packing import divide_stage
from hyfi_core.cost.fused_depth import fused_runs
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling.segment_compiler import SegmentCompiler
from hyfi_core.lowering.gpu_calls import for_gpu
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.lowering.planes import Plane
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.lowering.segments import build_tape
from hyfi_core.lowering.stage_values import boundary, entries_of
from hyfi_core.lowering.without_updates import updates_are_apart, without_updates
from hyfi_core.ops.boundary import BoundaryTransfer
from hyfi_core.ops.redistribute import is_channels_last
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.rules.instructions import RankProgram, Split
from hyfi_core.runtime.lowered_model import HostedStage, LoweredModel
from hyfi_core.runtime.subject import Subject


def lower_model(
    subject: Subject,
    program: Program,
    plan: ParallelPlan,
    placement: Placement,
    comm: Communicator,
    *,
    cells: int = 1,
    in_turn: bool = False,
    spills: bool = False,
    updates: bool = True,
) -> LoweredModel:
    """Cut and lower a captured model (collective over the replica; ranks compare their programs first).

    Args:
        subject: the model and its settings; it remembers the fused runs of cells in evaluation.
        program: the captured model.
        plan: plan of the run; cells count as ranks.
        placement: which ranks hold which stage.
        comm: the ranks of the replica, plane after plane.
        cells: number of cells of one process.
        in_turn: whether this is one of several cells of a process, which take turns.
        spills: whether maps are spilled: cells cannot read each other's memory, and segments run as they are.
        updates: whether this rank or cell computes new values of buffers; otherwise another cell does.

    Raises:
        RequestError: the model cannot be captured, has an operator without a rule, or differs between ranks.
    """
    digest = _agreed(program, comm)
    results, pick = picked_leaves(program, subject.settings.output)
    trained = _trained(subject.model, program)
    active = active_values(program, results, trained)
    stages = _stages(program, results, plan)
    index, rank = divmod(comm.rank, placement.size)
    settings = _LoweringSettings(
        plan=plan,
        placement=placement,
        rank=rank,
        trained=trained,
        active=active,
        norm_replicas=_norm_replicas(plan, program, subject.model.training),
        cell_runs=None if subject.model.training or not in_turn else _known_runs(subject.runs, program, plan, stages),
        cells=cells,
        spills=spills,
        plane=_plane(subject, index),
        compiler=None if spills else subject.compiler,
        updates=updates or plan.directions > 1 or not _can_leave_updates(program, stages),
    )
    lowered = _StagesOfRank(stages, settings)
    return LoweredModel(
        program,
        hosted=lowered.hosted,
        boundaries={edge: lowered.boundary(edge) for edge in edges(stages)},
        parameters=tuple(tuple(stage.program.parameters.values()) for stage in stages),
        buffers=tuple(tuple(stage.program.buffers.values()) for stage in stages),
        trained=frozenset(program.parameters[name] for name in trained if name in active),
        outputs=results,
        pick=pick,
        digest=digest,
    )


def _stages(program: Program, results: tuple[Any, ...], plan: ParallelPlan) -> tuple[Stage, ...]:
    assert plan.cuts != "auto" or plan.stages == 1, "cuts must be resolved first"
    return cut_program(program, results, () if plan.cuts == "auto" else plan.cuts)


def _can_leave_updates(program: Program, stages: Sequence[Stage]) -> bool:
    """Whether the program updates buffers (in evaluation it does not), and one cell can do so for all."""
    # All that a stage sends counts as needed, although a later stage may use it only for updates of buffers.
    needed = [name for stage in stages for name in (*refs_in(stage.outputs), *stage.sent)]
    return bool(program.mutations) and updates_are_apart(program, needed)


def _plane(subject: Subject, index: int) -> Plane:
    """Return this rank's plane, by its number in the replica."""
    channels_last = subject.channels_last or any(is_channels_last(p) for p in subject.model.parameters())
    return Plane(index=index, device=subject.device.type, channels_last=channels_last)


def _known_runs(
    runs_by_program: dict[Any, FusedRuns], program: Program, plan: ParallelPlan, stages: Sequence[Stage]
) -> FusedRuns | None:
    """Return the fused runs of cells in evaluation mode, chosen once; None with several stages."""
    if plan.stages > 1:
        return None
    # ``Subject`` keeps programs alive and clears the runs when it drops one, so that an id is not used again.
    key = (id(program), plan.grids)
    if key not in runs_by_program:
        only = pool_before_relu(stages[0].program, refs_in(stages[0].outputs))
        runs_by_program[key] = runs_for_cells(only, plan.grids[0])[0]
    return runs_by_program[key]


def _trained(model: nn.Module, program: Program) -> frozenset[str]:
    """Return the values of the parameters that are trained."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(value for value, name in program.parameters.items() if named[name].requires_grad)


def _norm_replicas(plan: ParallelPlan, program: Program, trains: bool) -> Fraction:
    """Return (images over which batch norms compute statistics) / (images of a replica's micro-batch)."""
    if not plan.sync_batch_norm or not trains:  # in evaluation mode each replica computes its own images
        return Fraction(1)
    images = program.values[program.image].shape[0]
    return Fraction(sum(plan.shares), plan.microbatches * images) if plan.shares else Fraction(plan.replicas)


@dataclass(frozen=True, kw_only=True)
class _LoweringSettings:
    """What lowering needs to know of every stage.

    Attributes:
        plan: plan of the run.
        placement: which ranks hold which stage.
        rank: position of this rank in its plane, as in the placement.
        trained: values of the parameters that are trained.
        active: values that have a gradient.
        norm_replicas: images over which batch norms compute statistics, as a multiple of those of a micro-batch.
        cell_runs: fused runs of cells in evaluation mode, chosen by memory; None: each stage chooses them by cost.
        cells: number of cells of one process.
        spills: whether maps are spilled.
        plane: plane of this rank.
        compiler: compiler of segments; None: they run as they are.
        updates: whether this rank or cell computes new values of buffers; with two directions all do.
    """

    plan: ParallelPlan
    placement: Placement
    rank: int
    trained: frozenset[str]
    active: frozenset[str]
    norm_replicas: Fraction
    # Chosen by memory only in evaluation: training keeps maps for backward anyway, and its fused runs save time.
    cell_runs: FusedRuns | None
    cells: int
    spills: bool
    plane: Plane
    # None with spilling: compiled code saves other tensors than those that pages are forecast for.
    compiler: SegmentCompiler | None
    updates: bool

    @property
    def cells_read_in_place(self) -> bool:
        """Whether all ranks are cells of one process and no map is spilled: cells can read each other's maps."""
        return self.plan.ranks_per_replica == self.cells and not self.spills


class _StagesOfRank:
    """The stages of a program, lowered in order, because a stage's inputs have the layouts of earlier outputs.

    Attributes:
        hosted: (stage, direction) -> the stage, for all that this rank holds.
    """

    def __init__(self, stages: Sequence[Stage], settings: _LoweringSettings) -> None:
        self._stages, self._settings = stages, settings
        self._splits: list[Mapping[str, Split]] = []
        self._entries: list[dict[str, Split | None]] = []
        self.hosted: dict[tuple[int, int], HostedStage] = {}
        placement, rank, branches = settings.placement, settings.rank, settings.plan.branches
        divided = False
        for index in range(len(stages)):
            self._entries.append(entries_of(stages[index], self._splits, placement.grids[index]))
            positions = {
                direction: placement.group(index, direction).index(rank)
                for direction in range(placement.directions)
                if rank in placement.group(index, direction)
            }
            # A rank without this stage lowers it as position 0: later stages need the layouts of its outputs.
            lowered = {position: self._lower(index, position) for position in {*positions.values()} or {0}}
            ranked = next(iter(lowered.values())).ranked
            divided |= bool(ranked.of_all_planes)
            self._splits.append(ranked.splits)
            self.hosted.update({(index, direction): lowered[position] for direction, position in positions.items()})
        if branches > 1 and not divided:
            raise RequestError(
                f"plan.branches is {branches}, but the model has no parallel branches that each take longer "
                f"than sending its result; use plan.branches=1, with plan.grids or plan.replicas for more ranks"
            )

    def boundary(self, edge: tuple[int, int]) -> BoundaryTransfer:
        """Return the transfer between two stages."""
        source, target = edge
        grids = self._settings.placement.grids[source], self._settings.placement.grids[target]
        have, need = self._splits[source], self._entries[target]
        stage, active, plane = self._stages[source], self._settings.active, self._settings.plane
        return boundary(stage, target, have, need, grids, active, plane.channels_last, plane.device)

    def _lower(self, index: int, position: int) -> HostedStage:
        """Return a stage as the rank at a position of its grid runs it.

        Args:
            index: index of the stage.
            position: number of the rank in the stage's grid, row-major.
        """
        stage, settings = self._stages[index], self._settings
        exits = stage.sent
        needed = (*refs_in(stage.outputs), *exits)
        program = pool_before_relu(
            stage.program if settings.updates else without_updates(stage.program, needed), needed
        )
        if settings.cell_runs is not None:
            ranked = self._by_memory(program, settings.cell_runs, index, position, exits)
        else:
            ranked = self._by_cost(program, index, position, exits)
        instructions = ranked.instructions
        # In evaluation without spilling, the cells of a process read each other's maps in place.
        reads_in_place = settings.cell_runs is not None and settings.cells_read_in_place
        if settings.cells > 1 and not reads_in_place:
            instructions = tuple(for_training(instruction) for instruction in instructions)
        if settings.plane.device == "cuda":
            of_cells = settings.cells > 1 and settings.cell_runs is None
            instructions = tuple(for_gpu(instruction, of_cells) for instruction in instructions)
        ranked = replace(ranked, instructions=instructions)
        if settings.plan.recomputes(index):
            _refuse_drawn(ranked)
        if settings.compiler is not None:
            # Last: compiled code has the operators as they are now.
            ranked = settings.compiler.compile(ranked)
        sources = {*settings.trained, *self._entries[index]} & settings.active
        tape = build_tape(ranked, sources, in_two=settings.plan.divides_backwards)
        return HostedStage(ranked, tape, position, stage.reads_image)

    def _by_memory(
        self, program: Program, runs: FusedRuns, index: int, position: int, exits: tuple[str, ...]
    ) -> RankProgram:
        """Return the instructions of stage ``index`` in evaluation mode, for the cell at a position of its grid.

        The fused runs ``runs`` were chosen so that cells need little memory.
        """
        settings = self._settings
        target = Target(
            settings.placement.grids[index],
            position,
            CELL_OPERATORS,
            gather_bytes=settings.plan.gather_bytes,
            joins_calls=settings.compiler is not None,
        )
        ranked = lower(program, target, self._stages[index].outputs, exits, runs)
        if settings.cells_read_in_place:
            # Halos are read from the other cells' maps, without messages.
            ranked = replace(ranked, instructions=tuple(map(reading_in_place, ranked.instructions)))
        return ranked

    def _by_cost(self, program: Program, index: int, position: int, exits: tuple[str, ...]) -> RankProgram:
        """Return the instructions of a stage, with fused runs chosen by cost and branches divided among planes."""
        settings, outputs = self._settings, self._stages[index].outputs
        grid = settings.placement.grids[index]
        target = Target(
            grid,
            position,
            entries=self._entries[index],
            norm_replicas=settings.norm_replicas,
            gather_bytes=settings.plan.gather_bytes,
            is_only_rank=settings.plan.ranks == 1,
            joins_calls=settings.compiler is not None,
            deferred_weights=settings.trained if settings.plan.divides_backwards else frozenset(),
        )
        if settings.plan.branches > 1:
            program, branches = divide_stage(program, outputs, exits, settings.plan.branches, grid)
            target = replace(target, plane=replace(settings.plane, branches=branches))
        # Of the divided program: a plane computes other branches, and fuses others.
        runs = fused_runs(program, target, outputs, exits, settings.plan.fused_halo)
        return lower(program, target, outputs, exits, runs)


def _refuse_drawn(ranked: RankProgram) -> None:
    """Refuse to recompute operators that draw from torch's generator: backward would use different numbers."""
    if ranked.drawn:
        op = ranked.drawn[0]
        raise RequestError(
            f"{op.text} in module {op.module!r} draws from torch's generator, so plan.recompute would draw different "
            f"numbers in backward; use dropout, bernoulli, rand or randn, or plan.recompute=False"
        )


def _agreed(program: Program, comm: Communicator) -> str:
    """Return the program's digest; refuse if it differs between ranks, because their messages would not match."""
    digest = program.digest()[:12]
    if comm.size > 1:
        operators = {f"operator {i}": _described(op) for i, op in enumerate(program.operators)}
        compare(comm, operators | {"the captured model": digest})
    return digest


def _described(op: Operator) -> str:
    """Return an operator as text, for messages: its name, its arguments (values by name), and its module."""
    settings = re.sub(r"Ref\(name='(.*?)'\)", r"\1", ", ".join(map(str, (*op.args, *sorted(op.kwargs.items())))))
    return f"{op.text}({settings}) of {op.module or 'the model'}"


def picked_leaves(program: Program, output: Output | None) -> tuple[tuple[Any, ...], Callable[[list[Any]], Any]]:
    """Return the needed leaves of the output, and a function that applies ``output`` to them.

    The user's ``output`` is first tried on the leaves' references (``Ref``) instead of tensors. If it selects one leaf,
    the other leaves are neither computed nor gathered.
    """
    leaves = program.outputs
    if output is None:
        return leaves, program.unflatten
    try:
        picked = output(program.unflatten(list(leaves)))
    except Exception:
        picked = None  # it computes on tensors: it needs all of them
    if isinstance(picked, Ref):
        return (picked,), lambda tensors: tensors[0]
    return leaves, lambda tensors: output(program.unflatten(tensors))
