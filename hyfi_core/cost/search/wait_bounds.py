"""Lower bounds of what a grid adds to stages: halo exchanges or margins, and the sums of batch norms.

    relu ── conv 1 x 1 ── norm ── v ── conv 3 x 3        a chain of pointwise operators, and the window that follows

The window needs pixels of neighbours. Either ranks exchange a value of the chain, with messages in forward and
backward; or every operator of the chain computes the margin that the window needs. An operator is in one chain at most,
so all chains of a stage take at least the sum of what is cheaper for each. Fused runs that reach further back take
more. Chains are those of the whole model, lowered once for each grid: the bounds hold for stages with the same layouts,
and are 0 for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.capture.stages import Stage
from hyfi_core.cost.links.node_links import NodeLinks
from hyfi_core.cost.operators import OperatorCost
from hyfi_core.cost.search.plan_bounds import PlanBounds
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.step.lowered_stages import LoweredPlans, middle_rank
from hyfi_core.cost.step.stage_cost import STATISTICS_BYTES
from hyfi_core.cost.step.whole_layouts import WholeLayouts
from hyfi_core.lowering.fused_halo import Flow, Sketch, reaching
from hyfi_core.lowering.fused_sketch import sketch_of
from hyfi_core.lowering.lower import Target, lowered_operators
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.lowering.stage_values import entries_of
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.rules.instructions import CollectiveCall, Split

_ROUNDING = 1e-9
"""Fraction by which bounds are lowered: the times of stages are summed in another order."""


@dataclass(frozen=True)
class _WindowNeed:
    """The pixels of a value that a window operator needs, some of them beyond the parts that ranks own.

    Attributes:
        window: name of the operator.
        layout: layout of the value.
        boxes: the box that each rank needs.
    """

    window: str
    layout: Layout
    boxes: Boxes


@dataclass(frozen=True)
class _PointwiseChain:
    """Pointwise operators in a row, and the window operators that use their result.

    Attributes:
        operators: their names, from the last back to the first; nothing else uses the values between them.
        windows: names of the window operators that need neighbours' pixels of the result.
        part: pixels of the largest part, as a fraction of the map.
        wide: the same, including the margin that the windows need.
        messages: number that the rank in the middle of the grid receives if a value of the chain is exchanged.
    """

    operators: tuple[str, ...]
    windows: frozenset[str]
    part: float
    wide: float
    messages: int


@dataclass(frozen=True)
class _GridWaits:
    """The places of a model where a grid adds time.

    Attributes:
        whole: the model, lowered for the grid.
        chains: the chains before windows.
        norms: results of the batch norms whose statistics ranks sum.
    """

    whole: WholeLayouts
    chains: tuple[_PointwiseChain, ...]
    norms: frozenset[str]

    @classmethod
    def of(cls, whole: WholeLayouts) -> _GridWaits:
        """Return what the grid of a lowered model adds."""
        calls = (call for call in whole.ranked.instructions if isinstance(call, CollectiveCall))
        norms = (name for call in calls if isinstance(call.operator, BatchNorm) for name in call.outputs)
        return cls(whole, _chains(whole), frozenset(name for name in norms if name is not None))


class WaitBounds:
    """Lower bounds of what grids add to the stages of plans, without cells and branches.

    Args:
        bounds: has the stages, and the costs of their operators.
        request: ranks, batch, machine and limits.
        lowered: lowers the whole model for a grid.
    """

    def __init__(self, bounds: PlanBounds, request: PlanRequest, lowered: LoweredPlans) -> None:
        self._bounds, self._machine, self._lowered = bounds, request.machine, lowered
        self._crowded = request.ranks > 1 and request.machine.devices_per_node > 1
        self._grids: dict[int, _GridWaits] = {}  # by the ``id`` of the whole layouts
        # By the ids of program and grid waits, and the wait for a core: each chain with its least time.
        self._seconds: dict[tuple[int, int, float], tuple[tuple[_PointwiseChain, float], ...]] = {}
        # By the id of the program and its cuts: the operators of each stage.
        self._operators: dict[tuple[int, tuple[str, ...] | str], tuple[list[Operator], ...]] = {}

    def of_stages(self, program: Program, plan: ParallelPlan) -> tuple[float, ...]:
        """Return, for each stage, the least seconds that its grid adds to forward and backward of a micro-batch.

        Args:
            program: the captured model, of one micro-batch.
            plan: with named cuts.
        """
        pieces, grids = self._bounds.pieces(plan), plan.grids * plan.interleave
        if plan.cells is not None or plan.branches > 1 or all(grid == (1, 1) for grid in grids):
            return (0.0,) * len(pieces)
        operators, core_wait_s = self._of_pieces(plan, pieces), self._machine.core_wait_s(plan.ranks)
        added, splits, links = [], list[Mapping[str, Split] | None](), NodeLinks(plan, self._machine)
        for stage, (piece, grid) in enumerate(zip(pieces, grids, strict=True)):
            # None: the layouts are not those of the whole model on this grid, so that the bound is 0.
            waits = self._of_grid(program, grid, plan.gather_bytes)
            if waits is not None and not _holds(waits.whole, piece, grid, operators[stage], splits):
                waits = None
            splits.append(None if waits is None else waits.whole.ranked.splits)
            if waits is None or grid == (1, 1):
                added.append(0.0)
                continue
            seconds = self._exchanges_s(program, waits, operators[stage], core_wait_s)
            link = links.within_stage(stage % len(plan.grids))
            for channels in self._summed_channels(program, waits, operators[stage]):
                seconds += 2 * (self._machine.all_reduce_s(prod(grid), STATISTICS_BYTES * channels, link) + core_wait_s)
            added.append(seconds * (1 - _ROUNDING))
        return tuple(added)

    def _of_pieces(self, plan: ParallelPlan, pieces: tuple[Stage, ...]) -> tuple[list[Operator], ...]:
        """Return the operators of each stage, as they would be lowered."""
        key = id(pieces[0].program), plan.cuts  # pieces are kept by the bounds
        if key not in self._operators:
            self._operators[key] = tuple(map(_as_lowered, pieces))
        return self._operators[key]

    def _of_grid(self, program: Program, grid: tuple[int, int], gather_bytes: int) -> _GridWaits | None:
        """Return where ranks of a grid wait in the whole model, computed once; None if it cannot be lowered for it."""
        whole = self._lowered.layouts(program, Target(grid, middle_rank(grid), gather_bytes=gather_bytes))
        if whole is None:
            return None
        if id(whole) not in self._grids:
            # The value refers to ``whole``, so no other object gets its ``id``.
            self._grids[id(whole)] = _GridWaits.of(whole)
        return self._grids[id(whole)]

    def _exchanges_s(self, program: Program, waits: _GridWaits, operators: list[Operator], core_wait_s: float) -> float:
        """Return the least seconds of exchanges or margins in a stage.

        Args:
            program: the captured model, of one micro-batch.
            waits: where ranks of the stage's grid wait in the whole model.
            operators: the stage's operators.
            core_wait_s: time for which an exchange waits for other ranks on its core.
        """
        names = {op.name for op in operators}
        key = id(program), id(waits), core_wait_s
        if key not in self._seconds:
            message_s = self._machine.message_s + min(self._machine.node.latency_s, self._machine.network.latency_s)
            costs = self._bounds.costs_of(program.values[program.image].shape[0])
            self._seconds[key] = tuple(
                (chain, min(2 * (core_wait_s + chain.messages * message_s), self._margins_s(chain, costs)))
                for chain in waits.chains
            )
        # Leave out chains that are divided between stages.
        return sum(
            seconds
            for chain, seconds in self._seconds[key]
            if names.issuperset(chain.operators) and not names.isdisjoint(chain.windows)
        )

    def _margins_s(self, chain: _PointwiseChain, costs: Mapping[str, OperatorCost]) -> float:
        """Return the least seconds that the operators of a chain take for margins, forward and backward."""
        return sum(
            min(self._both_s(cost, chain.wide, kind) - self._both_s(cost, chain.part, kind) for kind in _kinds(cost))
            for cost in map(costs.__getitem__, chain.operators)
        )

    def _both_s(self, cost: OperatorCost, part: float, kind: str) -> float:
        """Return the time of forward and backward on a part of the map."""
        forward_s = cost.forward_s(self._machine, part, self._crowded, kind)
        return forward_s + cost.backward_s(self._machine, part, self._crowded, kind)

    def _summed_channels(self, program: Program, waits: _GridWaits, operators: list[Operator]) -> list[int]:
        """Return the channels of each batch norm of a stage whose statistics are summed."""
        summed = (op for op in operators if op.first_output in waits.norms)
        return [program.values[op.inputs[0]].shape[1] for op in summed]


def _kinds(cost: OperatorCost) -> tuple[str, ...]:
    """Return the kinds by which an operator may be priced: a norm by either, whether ranks share it or not."""
    return ("norm", "shared_norm") if cost.kind == "norm" else (cost.kind,)


def _as_lowered(piece: Stage) -> list[Operator]:
    """Return the operators of a stage as they would be lowered."""
    pooled = pool_before_relu(piece.program, (*refs_in(piece.outputs), *piece.sent))
    return lowered_operators(pooled, piece.outputs, piece.sent)


def _holds(
    whole: WholeLayouts,
    piece: Stage,
    grid: tuple[int, int],
    operators: list[Operator],
    splits: list[Mapping[str, Split] | None],
) -> bool:
    """Whether a stage has the layouts of the whole model.

    Args:
        whole: the model, lowered for the grid of the stage.
        piece: the stage.
        grid: rows and columns of its ranks.
        operators: the stage's operators, as they would be lowered.
        splits: how the values of each earlier stage are split; None if that is not known.
    """
    if any(splits[source] is None for source in piece.entries):
        return False
    return whole.hold_for(operators, entries_of(piece, [known or {} for known in splits], grid))


def _chains(whole: WholeLayouts) -> tuple[_PointwiseChain, ...]:
    """Return a model's chains of pointwise operators on whose results convolutions or pools need neighbours' pixels."""
    operators, ranked = list(whole.operators.values()), whole.ranked
    sketch = sketch_of(ranked.program, operators, ranked.splits, ranked.fusible, ())
    makers = {value: flow for flow in sketch.flows for value in flow.makes}
    needs: dict[Flow, list[_WindowNeed]] = {}  # the last operator of a chain -> what windows need of its results
    for window in sketch.flows:
        own_results = sketch.layouts[window.makes[0]].parts
        # For these results, some rank needs pixels of ``value`` beyond its own part; pointwise operators need none.
        for value, boxes in reaching(sketch, window, own_results):
            layout = sketch.layouts[value]
            # A map in strips cannot have margins; bounds without its exchanges are still bounds.
            if value in makers and boxes.same_grid_as(layout.parts):
                needs.setdefault(makers[value], []).append(_WindowNeed(window.name, layout, boxes))
    return tuple(_pointwise_chain(sketch, makers, last, of_last) for last, of_last in needs.items())


def _pointwise_chain(
    sketch: Sketch, makers: Mapping[str, Flow], last: Flow, needs: list[_WindowNeed]
) -> _PointwiseChain:
    """Return the chain that ends with the operator ``last``; ``needs``: what windows need of its results."""
    layout, flow, operators = needs[0].layout, last, [last.name]
    # Back from the last operator, through values that nothing else reads.
    while flow.window is None and len(flow.takes) == 1:
        (value,) = flow.takes
        if sketch.readers[value] != 1 or value not in makers or sketch.layouts[value] != layout:
            break
        flow = makers[value]
        operators.append(flow.name)
    rank = middle_rank(layout.parts.grid)
    messages = min(len(plan_transfer(layout.parts, need.boxes, layout.map, rank).receives) for need in needs)
    return _PointwiseChain(
        operators=tuple(operators),
        windows=frozenset(need.window for need in needs),
        part=layout.parts.largest / layout.map.area,
        wide=max(layout.parts.largest, min(need.boxes.largest for need in needs)) / layout.map.area,
        messages=messages,
    )
