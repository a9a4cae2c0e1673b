"""Lowering: from a captured program and a grid to the instructions of a rank.

One pass over the program, in order; the rule of each operator adds the rank's instructions. Rules refuse here, before
any communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from hyfi_core.capture.program import Operator, Program, Ref, refs_in
from hyfi_core.errors import GatherError, RequestError
from hyfi_core.lowering.in_place import in_place
from hyfi_core.lowering.joined_calls import join_calls
from hyfi_core.lowering.planes import Plane, on_plane
from hyfi_core.lowering.weights_apart import weights_apart
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.plan.parallel_plan import GATHER_BYTES
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import renamed
from hyfi_core.rules.instructions import RankProgram, Split
from hyfi_core.rules.operator_facts import UNKNOWN, OperatorFacts
from hyfi_core.rules.replicated import draws_numbers, gathered, replicated
from hyfi_core.rules.table import OPERATORS

NOT_FUSED = FusedRuns()


@dataclass(frozen=True)
class Target:
    """The rank and settings for which a program is lowered.

    Attributes:
        grid: rows and columns of ranks.
        rank: the rank to lower for.
        operators: text of an operator -> its record.
        entries: values from other stages -> how they are split here, None for a replicated one.
        norm_replicas: number of replicas over which batch norms compute their statistics.
        gather_bytes: size of the largest map that every rank may gather for an operator that cannot be computed part by
            part.
        is_only_rank: whether there is no other rank or cell.
        plane: the plane of the rank, and the branches that each plane computes; by default there is one plane.
        joins_calls: whether local calls are joined where they can be fused; see ``lowering.joined_calls``.
        deferred_weights: parameters whose gradients can be computed later than those of maps; see
            ``lowering.weights_apart``.
    """

    grid: tuple[int, int]
    rank: int
    operators: Mapping[str, OperatorFacts] = field(default_factory=lambda: OPERATORS)
    entries: Mapping[str, Split | None] = field(default_factory=dict)
    norm_replicas: Fraction | int = 1
    gather_bytes: int = GATHER_BYTES
    is_only_rank: bool = False
    plane: Plane = field(default_factory=Plane)
    joins_calls: bool = False
    deferred_weights: frozenset[str] = frozenset()


def lower(
    program: Program,
    target: Target,
    outputs: tuple[Any, ...] | None = None,
    exits: tuple[str, ...] = (),
    runs: FusedRuns = NOT_FUSED,
) -> RankProgram:
    """Return the instructions that compute the outputs, the ``exits`` and every mutation.

    Split outputs are gathered; exits are sent to other stages as they are.

    Args:
        program: the captured model.
        target: the rank to lower for.
        outputs: leaves of the output; None for all that the model returns.
        exits: values that other stages need.
        runs: windows that share an exchange; by default each has its own.

    Raises:
        RequestError: an operator has no rule for how its maps are split, or a buffer would hold a whole map.
    """
    outputs = program.outputs if outputs is None else outputs
    builder = Builder(
        program, target.grid, target.rank, target.entries, runs, target.norm_replicas, target.gather_bytes
    )
    for op in target.plane.ordered(lowered_operators(program, outputs, exits)):
        _lower_operator(builder, op, target.operators.get(op.text, UNKNOWN))
    # After all operators: gathering adds instructions, and outputs are whole on every rank.
    leaves = tuple(Ref(builder.whole(item.name)) if isinstance(item, Ref) else item for item in outputs)
    if any(name in builder.splits for name in program.mutations.values()):
        raise RequestError(
            "the model stores a feature map in a buffer, but no rank holds a whole map; register no "
            "buffer with height and width"
        )
    # The order of passes: planes first, which divide by instruction; then those that look for single operators;
    # joined calls hide these; in place last, which asks who else reads a value.
    ranked = on_plane(builder.finish(leaves, exits), target.plane, target.rank)
    if target.deferred_weights:
        ranked = weights_apart(ranked, target.deferred_weights)
    return in_place(join_calls(ranked) if target.joins_calls else ranked, target.is_only_rank)


def lowered_operators(program: Program, outputs: tuple[Any, ...], exits: tuple[str, ...]) -> list[Operator]:
    """Return the operators, in order, that the outputs, the ``exits`` or a mutation need."""
    alive = program.needed({*refs_in(outputs), *exits, *program.mutations.values()})
    return [op for op in program.operators if any(name in alive for name in op.outputs if name is not None)]


def _lower_operator(builder: Builder, op: Operator, facts: OperatorFacts) -> None:
    """Add the instructions of an operator: computed by all ranks, on one rank, or divided by its rule."""
    rule = facts.rule
    if not any(name in builder.splits for name in op.inputs):  # no input is divided among ranks
        # Rules draw numbers by position, the same on all ranks; the operator itself would use torch's generator.
        if rule is not None and draws_numbers(op):
            rule(builder, op)
        else:
            replicated(builder, op)
    elif builder.grid == (1, 1):
        _lower_alone(builder, op, rule)
    else:
        # Only inside of a fused run, an operator computes margins of its inputs, too.
        _lower_split(builder, op if op.name in builder.runs.inside else _without_margins(builder, op), facts)


def _lower_split(builder: Builder, op: Operator, facts: OperatorFacts) -> None:
    """Lower by rule; if no rule supports the operator, compute it on gathered maps if they are small enough."""
    # A rule may have added instructions, even messages, before it refuses: these are taken back.
    mark = builder.mark()
    try:
        if facts.rule is None:
            alternative = f"{facts.instead}; or " if facts.instead else ""
            problem = "has no rule for maps that are split over ranks"
            builder.refuse(op, problem, f"{alternative}a grid of one rank")
        facts.rule(builder, op)
    except RequestError as refused:
        builder.rewind(mark)
        try:
            gathered(builder, op)
        except RequestError:
            # Larger limits help only where size alone is in the way.
            size = max(builder.nbytes(name) for name in op.inputs if name in builder.splits)
            if size <= builder.gather_bytes or isinstance(refused, GatherError) or draws_numbers(op):
                raise refused from None
            remedy = f"plan.gather_bytes={size} or more (now {builder.gather_bytes})"
            raise RequestError(f"{refused}; or {remedy}, with which every rank has the whole map") from None


def _lower_alone(builder: Builder, op: Operator, rule: Rule | None) -> None:
    """Lower for a single rank, which has whole maps: without a rule, the operator itself is called."""
    mark = builder.mark()
    try:
        if rule is not None:
            rule(builder, op)
            return
    except RequestError:
        builder.rewind(mark)
    # One rank has the whole map, so that "replicated" is the plain call.
    replicated(builder, renamed(op, {name: builder.whole(name) for name in op.inputs}))


def _without_margins(builder: Builder, op: Operator) -> Operator:
    """Return an operator that ends a fused run: its inputs are owned parts, without margins."""
    wide = [name for name in dict.fromkeys(op.inputs) if name in builder.splits and builder.splits[name].boxes]
    return renamed(op, {name: builder.owned(name) for name in wide}) if wide else op
