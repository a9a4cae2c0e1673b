"""Modelled time of the stages of a plan: operators on each rank's boxes, halo exchanges, sums and boundary transfers.

    forward     operators ── waits for halos ── waits for sums
    backward    operators ── waits for halos ── waits for sums ── forward again, if recomputed
                └── gradients complete ──▶ buckets are reduced, partly after the backward: ``reduce_s``

Each stage is lowered for the rank in the middle of its grid, which has the most neighbours. Operators take as long as
on the rank with the largest box.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from hyfi_core.capture.program import Operator, Program, Ref
from hyfi_core.capture.stages import Stage, active_values
from hyfi_core.cost.links.node_links import NodeLinks, PeerOffset
from hyfi_core.cost.links.reduction import GradientHolders
from hyfi_core.cost.machine import KNOWN_NORM, MachineModel
from hyfi_core.cost.operators import OperatorCost, operator_costs, value_bytes
from hyfi_core.cost.step.lowered_stages import DividedStage, LoweredPlans, lowered_stages, middle_rank
from hyfi_core.cost.step.spilling import NOTHING_SPILLED, SpilledMaps, SpillRule, SpillTimes
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.transfer import Strip, Transfer
from hyfi_core.rules.batch_norm import has_live_statistics
from hyfi_core.rules.instructions import CollectiveCall, RankProgram
from hyfi_core.schedule.in_flight import recomputes

STATISTICS_BYTES = 3 * 8
"""Bytes of a channel's statistics in a message: count, mean and variance in float64."""


@dataclass(frozen=True)
class StageCost:
    """Modelled time of one micro-batch in a stage, on its slowest rank, and of the end of a step.

    Attributes:
        forward_s: time of a forward, including waits within the stage.
        backward_s: time of a backward, including waits and, with recomputation, a forward; with ``plan.spill``, both
            with the time that moving maps adds.
        halo_s: the part of both that is spent waiting for halos.
        sums_s: the part of both that is spent waiting for sums over the ranks of the stage.
        branch_s: the part of both that is spent waiting for values of other planes.
        halo_bytes: bytes received in the halos of a forward.
        reduce_s: time of the gradient reduction after the last backward.
        update_s: time of the optimizer step.
        spilled: times of maps that leave memory.
        weight_s: the part of ``backward_s`` that a backward in two parts does last.
    """

    forward_s: float
    backward_s: float
    halo_s: float
    sums_s: float
    branch_s: float
    halo_bytes: float
    reduce_s: float
    update_s: float
    spilled: SpillTimes = NOTHING_SPILLED
    weight_s: float = 0.0

    @property
    def computing_s(self) -> float:
        """Time of a forward and a backward without waits within the stage."""
        waits_s = self.halo_s + self.sums_s + self.branch_s + self.spilled.exposed_s
        return self.forward_s + self.backward_s - waits_s


@dataclass
class _Waits:
    """Waits of a rank in one forward or backward, its work on strips of neighbours, and the bytes it receives."""

    halo_s: float = 0.0
    strips_s: float = 0.0
    sums_s: float = 0.0
    branch_s: float = 0.0
    halo_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.halo_s + self.strips_s + self.sums_s + self.branch_s


@dataclass
class _Clock:
    """Computation of a stage in a forward and a backward, and the times at which its gradients are complete.

    Attributes:
        forward_s: all operators, forward.
        again_s: all operators in a second forward, which knows the statistics of batch norms.
        backward_s: all operators, backward.
        each_s: value -> time of the operator that computes it.
        gradients: (seconds since the backward began, bytes of the gradients that become complete then).
        weight_s: the part of ``backward_s`` that a backward in two parts does last.
    """

    forward_s: float = 0.0
    again_s: float = 0.0
    backward_s: float = 0.0
    each_s: dict[str, float] = field(default_factory=dict)
    gradients: list[tuple[float, int]] = field(default_factory=list)
    weight_s: float = 0.0


class _LoweredStage(NamedTuple):
    """A stage as ``PartlyLowered.stage`` returns it, with its number, autocast's dtype, and values with gradients."""

    number: int
    piece: Stage
    divided: DividedStage
    operators: Sequence[Operator]
    dtype: str | None
    active: frozenset[str]


class StageCosts:
    """The modelled costs of all stages of a plan on a machine. Creation lowers every stage.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
        machine: the machine model.
        dtype: of convolutions and matrix products under autocast; None: the dtype of their values.
        lowered_plans: stages of earlier calls with the same programs and machine; those of this plan are added.
        only: the only stage to compute, without lowering those after it; None: all stages, and their messages.
        spills: computes what leaves memory with ``plan.spill``; None, or with ``only``: time of moving is not counted.

    Attributes:
        stages: cost of each stage; with ``only``, of this stage alone.
        edges: (sending stage, receiving stage) -> seconds of a message.
        watch_s: seconds in which every rank checks the weights of the whole model, once in a step.
        machine: the machine model.

    Raises:
        RequestError: the model cannot be cut or lowered so.
    """

    def __init__(
        self,
        program: Program,
        plan: ParallelPlan,
        machine: MachineModel,
        dtype: str | None = None,
        lowered_plans: LoweredPlans | None = None,
        only: int | None = None,
        spills: SpillRule | None = None,
    ) -> None:
        self._plan, self.machine, self._links = plan, machine, NodeLinks(plan, machine)
        self.watch_s = machine.watch_s(len(program.parameters))
        cells = plan.cell_grid or (1, 1)
        self._cells = cells[0] * cells[1]
        self._program = program
        self._fine = plan.by_cells()  # the plan, with cells as ranks
        self._core_wait_s = machine.core_wait_s(plan.ranks)  # wait for other ranks on the same core, in each exchange
        self._crowded = plan.ranks > 1 and machine.devices_per_node > 1
        lowered_plans = self._known = LoweredPlans() if lowered_plans is None else lowered_plans
        lowered = lowered_stages(program, plan, self._fine, machine, lowered_plans)
        # With ``only``, costs are those of a bound, without what leaves memory.
        spills = spills if plan.spill is not None and only is None else None
        self._spilled: tuple[SpilledMaps, ...] = () if spills is None else spills(program, plan, lowered_plans)
        numbers = range(plan.stages) if only is None else (only,)
        self.stages = tuple(
            self._stage(_LoweredStage(number, *lowered.stage(number), dtype, lowered.active)) for number in numbers
        )
        carried = lowered.whole().carried if only is None else {}
        links = self._links
        self.edges = {edge: self._core_wait_s + links.edge_s(edge, incoming) for edge, incoming in carried.items()}

    def _stage(self, stage: _LoweredStage) -> StageCost:
        """Return the cost of a stage: computation, waits, recomputation and spilling."""
        index, divided = stage.number, stage.divided
        way = stage.dtype, self._cells, self._crowded  # all that the clock of a stage depends on
        clock = self._known.derived(divided, way, lambda: self._clock(stage))
        # Planes wait for each other in each region: the slowest one counts for all.
        waits = max((self._waits(plane, clock.each_s, index) for plane in divided.planes), key=lambda w: w.total_s)
        waits.branch_s = self._branch_s(divided)
        recompute_s = clock.again_s if recomputes(self._plan, index) else 0.0
        scale = 0.5 if self._plan.reduce_dtype == "bfloat16" else 1.0  # of the bytes of gradients, which are float32
        # Gradients become complete during the whole backward; of one in two parts, during the second part, in the same
        # order.
        weight_s = clock.weight_s if self._plan.divides_backwards else clock.backward_s
        shorter = weight_s / (clock.backward_s or 1.0)
        gradients = [(shorter * ready_s, scale * length) for ready_s, length in clock.gradients]
        group = GradientHolders.of(self._plan, index, self.machine.devices_per_node)
        forward_s, backward_s = clock.forward_s + waits.total_s, clock.backward_s + recompute_s + waits.total_s
        spilled = NOTHING_SPILLED
        if self._spilled:
            times_s = forward_s, backward_s
            spilled = SpillTimes.of(self._spilled[index], self._plan, self.machine, clock.each_s, times_s)
        return StageCost(
            forward_s=forward_s + spilled.forward_s,
            backward_s=backward_s + spilled.again_s + spilled.backward_s,
            halo_s=2 * waits.halo_s,
            sums_s=2 * waits.sums_s,
            branch_s=2 * waits.branch_s,
            halo_bytes=waits.halo_bytes,
            reduce_s=group.exposed_s(gradients, weight_s, self.machine),
            update_s=update_s(stage.piece.program, self.machine),
            spilled=spilled,
            weight_s=clock.weight_s,
        )

    def _clock(self, stage: _LoweredStage) -> _Clock:
        """Return the times of a stage's computation, from the costs of its operators."""
        index, piece, divided, operators, dtype, active = stage
        ranks = prod(self._plan.grids[index % len(self._plan.grids)])
        program = divided.planes[0].program
        # Gradients enter a stage at the values that it sends, and leave it at the values that it receives.
        leaving = tuple(Ref(name) for names in piece.exits.values() for name in names if name in active)
        entering = [name for names in piece.entries.values() for name in names if name in active]
        active_here = active_values(program, (piece.outputs, leaving), (*program.parameters, *entering))
        known = self._known.costs(self._program, dtype)
        sent = [ref.name for ref in leaving]
        cost_list = operator_costs(program, self.machine, dtype, active_here, known, sent)
        costs = {op.name: cost for op, cost in zip(program.operators, cost_list, strict=True)}
        return self._computed(divided, operators, costs, ranks)

    def _computed(
        self, divided: DividedStage, operators: Sequence[Operator], costs: Mapping[str, OperatorCost], ranks: int
    ) -> _Clock:
        """Return the times of a stage's computation; in each region the slowest plane counts.

        Args:
            divided: the stage, lowered for each plane.
            operators: its operators, in order.
            costs: name of an operator -> its cost.
            ranks: number of ranks of a plane.
        """
        clock, ranked = _Clock(), divided.planes[0]
        forward: dict[str, float] = {}
        again: dict[str, float] = {}
        backward: dict[str, float] = {}
        for op in operators:
            fraction, cost = self._fraction(ranked, op, ranks), costs[op.name]
            has_statistics = cost.kind == "norm" and has_live_statistics(op)
            kind = "shared_norm" if has_statistics and ranks * self._cells > 1 else None
            seconds = forward[op.name] = self._of_cells(cost, cost.forward_s, fraction, kind)
            clock.each_s[op.first_output] = again[op.name] = seconds
            if has_statistics:  # a second forward may use those of the first
                again[op.name] = min(seconds, self._of_cells(cost, cost.forward_s, fraction, KNOWN_NORM))
            backward[op.name] = self._of_cells(cost, cost.backward_s, fraction, kind)
        gradients, branches = _gradient_bytes(ranked.program, operators), divided.branches
        regions = branches.regions or (tuple(op.name for op in operators),)
        every = range(branches.planes)
        for region in regions:
            loads, loads_again = [0.0] * branches.planes, [0.0] * branches.planes
            for name in region:
                for plane in (branches.owners[name],) if name in branches.owners else every:
                    loads[plane] += forward[name]
                    loads_again[plane] += again[name]
            clock.forward_s += max(loads)
            clock.again_s += max(loads_again)
        for region in reversed(regions):
            loads = [clock.backward_s] * branches.planes
            for name in reversed(region):
                planes = (branches.owners[name],) if name in branches.owners else every
                for plane in planes:
                    loads[plane] += backward[name]
                if name in gradients:
                    clock.gradients.append((max(loads[plane] for plane in planes), gradients[name]))
            clock.backward_s = max(loads)
        # Planes compute at the same time, so the gradients of a region are not in order of time yet, as buckets are.
        clock.gradients.sort(key=lambda gradient: gradient[0])
        of_weights_s = sum(costs[name].of_weights * seconds for name, seconds in backward.items())
        clock.weight_s = clock.backward_s * of_weights_s / (sum(backward.values()) or 1.0)
        return clock

    def _of_cells(self, cost: OperatorCost, seconds: Callable[..., float], fraction: float, kind: str | None) -> float:
        """Return the seconds of an operator in all cells of a rank; each cell repeats what does not depend on the map.

        Args:
            cost: the operator's cost.
            seconds: its method ``forward_s`` or ``backward_s``.
            fraction: the rank's part of the map.
            kind: kind of operator to use instead of the operator's own.
        """
        if cost.kind == "view":
            return 0.0
        whole_s = seconds(self.machine, fraction, self._crowded, kind)
        again_s = seconds(self.machine, 0.0, self._crowded, kind) if self._cells > 1 else 0.0
        return whole_s + (self._cells - 1) * again_s

    def _fraction(self, ranked: RankProgram, op: Operator, ranks: int) -> float:
        """Return the fraction of an operator's map that the rank with the largest part computes; 1 if not split."""
        names = (*(name for name in op.outputs if name is not None), *op.inputs)
        split = next((ranked.splits[name] for name in names if name in ranked.splits), None)
        if split is None or not split.layout.map.area:
            return 1.0
        # Cells of a rank are computed one after the other: their sum counts, not the largest.
        most = split.held.largest if self._cells == 1 else split.held.area / ranks
        return most / split.layout.map.area

    def _waits(self, ranked: RankProgram, each_s: Mapping[str, float], stage: int) -> _Waits:
        """Return the waits of a rank in a forward, the same as in a backward; ``each_s``: value -> operator's time."""
        waits = _Waits()
        for call in ranked.instructions:
            if not isinstance(call, CollectiveCall) or call.between_planes:
                continue
            # An exchange by itself, or that of the halo of a window operator, which computes meanwhile.
            operator: Any = call.operator
            transfer = getattr(getattr(operator, "halo", operator), "transfer", None)
            if isinstance(transfer, Transfer):
                hidden_s = each_s if hasattr(operator, "halo") else {}
                self._exchange(waits, ranked, call, transfer, hidden_s, stage)
            else:
                waits.sums_s += self._sum_s(ranked, call, stage)
        return waits

    def _exchange(
        self,
        waits: _Waits,
        ranked: RankProgram,
        call: CollectiveCall,
        transfer: Transfer,
        hidden_s: Mapping[str, float],
        stage: int,
    ) -> None:
        """Add an exchange to ``waits``: overhead of its messages, and the time of its bytes that is not hidden.

        ``hidden_s``: value -> seconds of computation of the same operator, which hide bytes; empty: nothing does.
        """
        name = call.inputs[0]
        assert name is not None
        info, area = ranked.values[name], max(1, transfer.map.area)
        pixel_bytes = prod(info.shape) * info.dtype.itemsize / area
        sent_px = sum(strip.box.area for strip in transfer.sends)
        length = pixel_bytes * max(transfer.received_px, sent_px)
        if hasattr(call.operator, "halo"):
            # A window operator also computes on each received strip: the mean of forward and backward counts in both.
            waits.strips_s += self._cells * len(transfer.receives) * sum(self.machine.strip_s) / 2
        if self._cells > 1:  # cells exchange by copies within the process
            waits.halo_s += self._cells * (self.machine.kernel_s + 2 * length / self.machine.memory_bytes_per_s)
            return
        overlapped_s = max((hidden_s.get(output, 0.0) for output in call.outputs if output is not None), default=0.0)
        grid = ranked.splits[name].held.grid
        # Backward receives cotangents from the ranks to which forward has sent.
        in_forward = self._links.halo_s(stage, _bytes_by_peer(grid, transfer.receives, pixel_bytes))
        in_backward = self._links.halo_s(stage, _bytes_by_peer(grid, transfer.sends, pixel_bytes))
        # Ranks wait for different times: charge that of the rank that waits longest, in forward or in backward.
        rank_waits_s = [
            software_s + max(0.0, wire_s - overlapped_s) for software_s, wire_s in (*in_forward, *in_backward)
        ]
        waits.halo_s += self._core_wait_s + max(rank_waits_s)
        waits.halo_bytes += length

    def _branch_s(self, divided: DividedStage) -> float:
        """Return the seconds for which a forward waits for values of other planes."""
        planes, link = divided.branches.planes, self._links.between_planes()
        lengths = [exchange.largest_bytes for exchange in divided.exchanges]
        return sum(self.machine.messages_s(planes - 1, length, link) for length in lengths)

    def _sum_s(self, ranked: RankProgram, call: CollectiveCall, stage: int) -> float:
        """Return the seconds of a sum over the ranks of a stage, and over the cells of each: a kernel for each cell."""
        if isinstance(call.operator, BatchNorm):
            assert call.inputs[0] is not None
            length = STATISTICS_BYTES * ranked.values[call.inputs[0]].shape[1]
        else:
            infos = [ranked.values[name] for name in call.outputs if name is not None and name in ranked.values]
            length = sum(prod(info.shape) * info.dtype.itemsize for info in infos)
        ranks = prod(self._plan.grids[stage % len(self._plan.grids)])
        group = ranks * (self._plan.replicas if call.all_replicas else 1)
        link = None if call.all_replicas else self._links.within_stage(stage)
        waited_s = self.machine.all_reduce_s(group, length, link) + (self._core_wait_s if group > 1 else 0.0)
        return waited_s + (self._cells - 1) * self.machine.kernel_s


def _bytes_by_peer(grid: tuple[int, int], strips: Sequence[Strip], pixel_bytes: float) -> dict[PeerOffset, float]:
    """Return offset of a peer -> bytes of its strips; ``strips``: those of the rank in the middle of the grid."""
    _, columns = grid
    middle_y, middle_x = divmod(middle_rank(grid), columns)
    bytes_by_peer: dict[PeerOffset, float] = {}
    for strip in strips:
        y, x = divmod(strip.peer, columns)
        peer = y - middle_y, x - middle_x
        bytes_by_peer[peer] = bytes_by_peer.get(peer, 0.0) + pixel_bytes * strip.box.area
    return bytes_by_peer


def update_s(program: Program, machine: MachineModel) -> float:
    """Return the time of the optimizer step for the weights of a stage."""
    weights = sum(value_bytes(program, name) for name in program.parameters)
    return machine.update_s(len(program.parameters), weights)


def _gradient_bytes(program: Program, operators: Sequence[Operator]) -> dict[str, int]:
    """Return operator -> bytes of the gradients that its backward completes: of weights that no earlier one uses."""
    sizes: dict[str, int] = {}
    first = {name: op.name for op in reversed(operators) for name in op.inputs if name in program.parameters}
    for name, user in first.items():
        sizes[user] = sizes.get(user, 0) + value_bytes(program, name)
    return sizes
