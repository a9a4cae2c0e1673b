"""Compiled models: created once for an image shape and a set of flags, and used in every step."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from hyfi_core.capture.autocast import dtypes_under_autocast
from hyfi_core.capture.program import Operator, Program, Ref, refs_in
from hyfi_core.capture.stages import Stage, active_values, cut_program, edges
from hyfi_core.cells.fused_memory import runs_for_cells
from hyfi_core.cells.fused_place import CELL_OPERATORS
from hyfi_core.cells.halo import for_prediction, for_training
from hyfi_core.comm.agree import compare
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.branch_packing import divide_stage
from hyfi_core.cost.fused_depth import fused_runs
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.lowering.planes import Plane
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.lowering.segment_compiler import SegmentCompiler
from hyfi_core.lowering.segments import Tape, build_tape
from hyfi_core.lowering.stage_values import boundary, entries_of
from hyfi_core.ops.boundary import BoundaryTransfer
from hyfi_core.ops.redistribute import is_channels_last
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.rules.instructions import RankProgram, Split

Output = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)  # compared by identity: used as a key
class HostedStage:
    """A stage as one of its ranks runs it.

    Attributes:
        ranked: this rank's instructions.
        tape: the same as steps.
        position: this rank's position in the stage's grid.
        reads_image: whether it reads the image.
    """

    ranked: RankProgram
    tape: Tape
    position: int
    reads_image: bool


class StageNames(Protocol):
    """Which stages use which parameters and buffers; a ``Compiled`` model is one."""

    @property
    def names(self) -> Sequence[Iterable[str]]:
        """Names of parameters and buffers, for each stage."""
        ...

    @property
    def trained(self) -> Collection[str]:
        """Names of the parameters that get gradients."""
        ...


@dataclass(frozen=True)
class Compiled:
    """A model ready to run on this rank for one image shape and one set of flags.

    Attributes:
        program: the whole model.
        hosted: (stage, direction) -> the stage, for all that this rank holds.
        boundaries: (from, to) -> boundary transfer between two stages, the same on every rank.
        parameters: for each stage, the user's names of the parameters that it uses.
        buffers: the same for buffers.
        trained: the user's names of parameters that get a gradient.
        outputs: the leaves of the output that ``pick`` takes: values of the program, and constants.
        pick: turns the leaves of the output into the result of ``output``.
        digest: of the whole model's program, the same on every rank.
    """

    program: Program
    hosted: Mapping[tuple[int, int], HostedStage]
    boundaries: Mapping[tuple[int, int], BoundaryTransfer]
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    trained: frozenset[str]
    outputs: tuple[Any, ...]
    pick: Callable[[list[Any]], Any]
    digest: str

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """For each stage, the user's names of all that it uses."""
        return tuple((*p, *b) for p, b in zip(self.parameters, self.buffers, strict=True))

    @property
    def gathered(self) -> tuple[str, ...]:
        """Descriptions of the maps that every rank gathers."""
        return tuple(dict.fromkeys(line for stage in self.hosted.values() for line in stage.ranked.gathered))

    @property
    def only(self) -> HostedStage:
        """The stage of a plan that has one."""
        assert len(self.parameters) == 1
        return self.hosted[0, 0]

    def leaves(self, stage: HostedStage, values: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the leaves of the output after a run of the last stage."""
        return [values[item.name] if isinstance(item, Ref) else item for item in stage.ranked.outputs]


def compile_model(
    model: nn.Module,
    program: Program,
    plan: ParallelPlan,
    placement: Placement,
    comm: Communicator,
    output: Output | None,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
    runs_for_memory: dict[Any, FusedRuns] | None = None,
    cells: int = 1,
    channels_last: bool = False,
    spills: bool = False,
    compiler: SegmentCompiler | None = None,
) -> Compiled:
    """Cut and lower a captured model (collective over the replica; ranks compare their programs first).

    Args:
        model: the user's module.
        program: its capture.
        plan: of the run.
        placement: which ranks hold which stage.
        comm: the ranks of the replica, plane after plane.
        output: selects the logits from the model's output.
        autocast: dtype of autocast.
        device: type of the model's device.
        runs_for_memory: cache of fused runs for cells; in evaluation mode these are chosen by memory.
        cells: number of cells of one process.
        channels_last: whether maps are channels-last although weights are not.
        spills: whether maps are spilled: cells cannot read each other's memory.
        compiler: of segments; None: they run as they are, as spilled maps need.

    Raises:
        RequestError: the model cannot be captured, has an operator without a rule, or differs between ranks.
    """
    digest = _agreed(program, comm)
    results, pick = _picked_leaves(program, output)
    trained = _trained(model, program)
    active = active_values(program, results, trained)
    assert plan.cuts != "auto" or plan.stages == 1, "cuts must be resolved first"
    stages = cut_program(program, results, () if plan.cuts == "auto" else plan.cuts)
    # In evaluation mode each replica computes its own images.
    together = _taken_together(plan, program.values[program.image].shape[0]) if model.training else Fraction(1)
    runs = None if model.training else _known_runs(runs_for_memory, program, plan, stages)
    last = channels_last or any(is_channels_last(p) for p in model.parameters())
    dtypes = dtypes_under_autocast(program, autocast, device) if autocast and plan.stages * plan.branches > 1 else {}
    index, rank = divmod(comm.rank, placement.size)
    plane = Plane(index=index, device=device, dtypes=dtypes, channels_last=last)
    lowered = _Lowered(stages, placement, rank, trained, active, plan, together, runs, cells, spills, plane, compiler)
    return Compiled(
        program,
        lowered.hosted,
        {edge: lowered.boundary(edge, dtypes, last) for edge in edges(stages)},
        tuple(tuple(stage.program.parameters.values()) for stage in stages),
        tuple(tuple(stage.program.buffers.values()) for stage in stages),
        frozenset(program.parameters[name] for name in trained if name in active),
        results,
        pick,
        digest,
    )


def _known_runs(
    runs_by_program: dict[Any, FusedRuns] | None, program: Program, plan: ParallelPlan, stages: Sequence[Stage]
) -> FusedRuns | None:
    """Return the fused runs of cells in evaluation mode, chosen once; None without cells or with several stages."""
    if runs_by_program is None or plan.stages > 1:
        return None
    key = (id(program), plan.grids)
    if key not in runs_by_program:
        only = pool_before_relu(stages[0].program, refs_in(stages[0].outputs))
        runs_by_program[key] = runs_for_cells(only, plan.grids[0])[0]
    return runs_by_program[key]


def _trained(model: nn.Module, program: Program) -> frozenset[str]:
    """Return the values of the parameters that are trained."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(value for value, name in program.parameters.items() if named[name].requires_grad)


def _taken_together(plan: ParallelPlan, images: int) -> Fraction:
    """Return the ratio of images in batch norm statistics to those of a replica's micro-batch."""
    if not plan.sync_batch_norm:
        return Fraction(1)
    return Fraction(sum(plan.shares), plan.microbatches * images) if plan.shares else Fraction(plan.replicas)


class _Lowered:
    """The stages of a program, lowered in order, because a stage's inputs have the layouts of earlier outputs."""

    def __init__(
        self,
        stages: Sequence[Stage],
        placement: Placement,
        rank: int,
        trained: frozenset[str],
        active: frozenset[str],
        plan: ParallelPlan,
        replicas: Fraction,
        runs: FusedRuns | None,
        cells: int,
        spills: bool,
        plane: Plane,
        compiler: SegmentCompiler | None,
    ) -> None:
        self._compiler = compiler
        self._runs = runs
        self._plane = plane
        divided = False
        self._cells, self._spills = cells, spills
        self._shares_memory = plan.ranks_per_replica == cells and not spills
        self._stages = stages
        self._placement = placement
        self._active = active
        self._trained = trained
        self._plan = plan
        self._replicas = replicas
        self._splits: list[Mapping[str, Split]] = []
        self._entries: list[dict[str, Split | None]] = []
        self.hosted: dict[tuple[int, int], HostedStage] = {}
        for index in range(len(stages)):
            self._entries.append(entries_of(stages[index], self._splits, placement.grids[index]))
            positions = {
                direction: placement.group(index, direction).index(rank)
                for direction in range(placement.directions)
                if rank in placement.group(index, direction)
            }
            lowered = {position: self._lower(index, position) for position in {*positions.values()} or {0}}
            ranked = next(iter(lowered.values())).ranked
            divided |= bool(ranked.undivided)
            self._splits.append(ranked.splits)
            self.hosted.update({(index, direction): lowered[position] for direction, position in positions.items()})
        if plan.branches > 1 and not divided:
            raise RequestError(
                f"plan.branches is {plan.branches}, but the model has no parallel branches that each take longer "
                f"than sending its result; use plan.branches=1, with plan.grids or plan.replicas for more ranks"
            )

    def boundary(
        self, edge: tuple[int, int], dtypes: Mapping[str, torch.dtype], channels_last: bool
    ) -> BoundaryTransfer:
        """Return the transfer between two stages."""
        source, target = edge
        grids = self._placement.grids[source], self._placement.grids[target]
        have, need = self._splits[source], self._entries[target]
        return boundary(self._stages[source], target, have, need, grids, self._active, dtypes, channels_last)

    def _lower(self, index: int, position: int) -> HostedStage:
        stage = self._stages[index]
        exits = tuple(dict.fromkeys(name for names in stage.exits.values() for name in names))
        grid, entries = self._placement.grids[index], self._entries[index]
        program = pool_before_relu(stage.program, (*refs_in(stage.outputs), *exits))
        wide, joins = self._plan.gather_bytes, self._compiler is not None
        if self._runs is not None:
            target = Target(grid, position, CELL_OPERATORS, gather_bytes=wide, joins=joins)
            ranked = lower(program, target, stage.outputs, exits, self._runs)
            if self._shares_memory:
                ranked = replace(ranked, instructions=tuple(map(for_prediction, ranked.instructions)))
        else:
            target = Target(
                grid,
                position,
                entries=entries,
                replicas=self._replicas,
                gather_bytes=wide,
                alone=self._plan.ranks == 1,
                joins=joins,
            )
            if self._plan.branches > 1:
                program, branches = divide_stage(program, stage.outputs, exits, self._plan.branches, grid)
                target = replace(target, plane=replace(self._plane, branches=branches))
            runs = fused_runs(program, target, stage.outputs, exits, self._plan.fused_halo)
            ranked = lower(program, target, stage.outputs, exits, runs)
        if self._cells > 1 and not (self._runs is not None and self._shares_memory):
            ranked = replace(
                ranked,
                instructions=tuple(for_training(instruction, self._spills) for instruction in ranked.instructions),
            )
        if self._plan.recomputes(index):
            _refuse_drawn(ranked)
        if self._compiler is not None:
            ranked = self._compiler.compile(ranked)
        sources = {*self._trained, *self._entries[index]} & self._active
        return HostedStage(ranked, build_tape(ranked, sources), position, stage.reads_image)


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
    settings = re.sub(r"Ref\(name='(.*?)'\)", r"\1", ", ".join(map(str, (*op.args, *sorted(op.kwargs.items())))))
    return f"{op.text}({settings}) of {op.module or 'the model'}"


def _picked_leaves(program: Program, output: Output | None) -> tuple[tuple[Any, ...], Callable[[list[Any]], Any]]:
    """Return the needed leaves of the output, and a function that applies ``output`` to them.

    ``output`` is first tried on names instead of tensors: if it only selects, maps that it does not select are neither
    computed nor gathered.
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
