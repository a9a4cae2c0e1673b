"""Packing of parallel branches: which plane computes which operators of a stage.

Operators in a row are a chain if each is the only user of the one before it. Chains are sorted by their distance from
the input and divided into regions:

    chain       a │ b c d e │ f │ g h │ i          a, f, i: one chain, computed in every plane
    plane 0     a │ b     e │ f │ g   │ i          b and e have no values in common with c and d
    plane 1     a │   c d   │ f │   h │ i

Within a region, chains that use each other's values stay together, and such groups are packed onto planes, the longest
first (LPT). The regions with the least total time are found by dynamic programming; the time of a divided region is
that of its fullest plane, plus the exchange of the values that are used after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.operators import operator_costs, value_bytes
from hyfi_core.lowering.lower import lowered_operators
from hyfi_core.lowering.plane_sums import sum_in_planes
from hyfi_core.plan.branches import Branches

LONGEST_REGION = 64
"""Chains; two cells of AmoebaNet have about 40."""


@dataclass
class _Chain:
    """Operators in a row.

    Attributes:
        names: the operators, in order.
        seconds: time of their forward and backward.
        sources: indices of the chains whose values it uses.
        users: indices of the chains that use its values; filled by ``_sorted``.
        sent_bytes: bytes of the results of its last operator, which other chains or the stage's result use.
        is_result: whether the stage returns one of these results.
        level: largest number of chains before it on any path.
    """

    names: list[str]
    seconds: float
    sources: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)
    sent_bytes: int = 0
    is_result: bool = False
    level: int = 0


def divide_stage(
    program: Program, outputs: tuple[Any, ...], exits: tuple[str, ...], planes: int, grid: tuple[int, int]
) -> tuple[Program, Branches]:
    """Divide a stage among planes; return (the stage, its division).

    In the returned stage, a plane adds those terms of a sum that it computes itself: it sends one map, not several.

    Ranks and forecasts must divide alike, so the machine is the default one.

    Args:
        program: the stage, as it would be lowered without planes.
        outputs: leaves of the model's output that the stage returns.
        exits: values that other stages need.
        planes: number of planes.
        grid: rows and columns of a plane's ranks.
    """
    branches = pack_branches(program, outputs, exits, planes, grid)
    return sum_in_planes(program, branches, (*refs_in(outputs), *exits))


def pack_branches(
    program: Program,
    outputs: tuple[Any, ...],
    exits: tuple[str, ...],
    planes: int,
    grid: tuple[int, int] = (1, 1),
    machine: MachineModel | None = None,
) -> Branches:
    """Return the division of a stage's operators that takes the least time; it may divide nothing.

    If the latency of messages outweighs the gain of every division, it returns the best division without latencies: the
    ranks of the other planes have nothing else to do.

    Args:
        program: the stage, as it will be lowered.
        outputs: leaves of the model's output that the stage returns.
        exits: values that other stages need.
        planes: number of planes.
        grid: rows and columns of a plane's ranks, which divide all maps.
        machine: the machine model; None: the reference machine.
    """
    if planes == 1:
        return Branches()
    machine = machine or reference_machine()
    operators = lowered_operators(program, outputs, exits)
    # ``free``: operators that read no computed value, only weights and constants; they are the first region.
    free, chains = _chains(program, operators, {*refs_in(outputs), *exits}, prod(grid), machine)
    link = machine.link(planes * prod(grid))
    # First with latencies; a second search without them only if the first divides nothing.
    for latency_s in (machine.message_s + link.latency_s, 0.0):
        regions, plane_of = _RegionSearch(chains, planes, latency_s, link.bytes_per_s).best()
        if plane_of:
            break
    names = tuple(tuple(name for number in region for name in chains[number].names) for region in regions)
    owners = {name: plane for number, plane in plane_of.items() for name in chains[number].names}
    return Branches(planes, (tuple(free), *names), owners)


def _chains(
    program: Program, operators: Sequence[Operator], results: set[str], ranks: int, machine: MachineModel
) -> tuple[list[str], list[_Chain]]:
    """Return (operators that use no computed value, chains of all others).

    In a chain, each operator is the only user of the one before it. Chains are sorted by level.

    Args:
        program: the stage.
        operators: the stage's operators, as they will be lowered.
        results: values that leave the stage.
        ranks: number of ranks of a plane, which divide all maps.
        machine: the machine model.
    """
    costs = {op.name: cost for op, cost in zip(program.operators, operator_costs(program, machine), strict=True)}
    available = {*program.parameters, *program.buffers, *program.constants}
    free: list[str] = []
    chains: list[_Chain] = []
    maker: dict[str, int] = {}  # value -> index of the chain that computes it
    users = _users(operators)
    for op in operators:
        cost = costs[op.name]
        seconds = cost.forward_s(machine, 1 / ranks, crowded=False) + cost.backward_s(machine, 1 / ranks, crowded=False)
        if all(name in available for name in op.inputs):
            free.append(op.name)
            available.update(name for name in op.outputs if name is not None)
            continue
        sources = {maker[name] for name in op.inputs if name in maker}
        number = next(iter(sources)) if len(sources) == 1 else -1
        # The only user of a single source continues its chain; the value between them stays in the plane.
        if number >= 0 and users[chains[number].names[-1]] == {op.name}:
            chains[number].names.append(op.name)
            chains[number].seconds += seconds
            chains[number].sent_bytes = 0
        else:
            number = len(chains)
            level = 1 + max((chains[source].level for source in sources), default=-1)
            chains.append(_Chain([op.name], seconds, sources, level=level))
        for name in op.outputs:
            if name is not None:
                maker[name] = number
                # A rank sends its part of a map to the rank with the same position.
                chains[number].sent_bytes += value_bytes(program, name) // ranks
                chains[number].is_result |= name in results
    return free, _sorted(chains)


def _users(operators: Sequence[Operator]) -> dict[str, set[str]]:
    """Return operator -> the operators that use its values."""
    maker = {name: op.name for op in operators for name in op.outputs if name is not None}
    users: dict[str, set[str]] = {op.name: set() for op in operators}
    for op in operators:
        for name in op.inputs:
            if name in maker:
                users[maker[name]].add(op.name)
    return users


def _sorted(chains: list[_Chain]) -> list[_Chain]:
    """Return the chains by level, numbered anew: ``sources`` and ``users`` are positions in the result."""
    order = sorted(range(len(chains)), key=lambda number: (chains[number].level, number))
    new_number = {old: new for new, old in enumerate(order)}
    ordered = [chains[old] for old in order]
    for number, chain in enumerate(ordered):
        chain.sources = {new_number[old] for old in chain.sources}
        for source in chain.sources:
            ordered[source].users.add(number)
    return ordered


class _RegionSearch:
    """The search for the regions with the least total time, by dynamic programming over the chains.

    Args:
        chains: sorted, so that each is behind those whose values it uses.
        planes: number of planes.
        latency_s: latency of a message between planes.
        bytes_per_s: bandwidth of the link between planes.
    """

    def __init__(self, chains: Sequence[_Chain], planes: int, latency_s: float, bytes_per_s: float) -> None:
        self._chains, self._planes = chains, planes
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        never = len(chains) + 1
        # Results of the stage count as used after all chains: every plane needs them, so their owner sends them.
        self._last_user = [never if c.is_result else max(c.users, default=-1) for c in chains]

    def best(self) -> tuple[list[range], dict[int, int]]:
        """Return (regions as ranges of chains, chain -> plane for the chains that only one plane computes)."""
        count = len(self._chains)
        least = [0.0, *[float("inf")] * count]  # seconds of the first n chains
        # For the first n chains: where their last region starts, and the planes of its chains.
        steps: list[tuple[int, dict[int, int]]] = [(0, {})] * (count + 1)
        for start in range(count):
            alone = least[start] + self._chains[start].seconds
            if alone <= least[start + 1]:
                least[start + 1], steps[start + 1] = alone, (start, {})
            groups: list[set[int]] = []
            # Limited: without a limit, the search is quadratic in the number of chains.
            for stop in range(start + 1, min(count, start + LONGEST_REGION) + 1):
                groups = self._joined(groups, stop - 1)
                if len(groups) > 1:
                    seconds, owners = self._packed(groups, stop)
                    if least[start] + seconds < least[stop]:
                        least[stop], steps[stop] = least[start] + seconds, (start, owners)
        # From the last chain back, region by region.
        regions, plane_of, at = list[range](), dict[int, int](), count
        while at:
            start, owners = steps[at]
            regions.append(range(start, at))
            plane_of.update(owners)
            at = start
        return regions[::-1], plane_of

    def _joined(self, groups: Sequence[set[int]], chain: int) -> list[set[int]]:
        """Return the groups after adding a chain: the groups whose values it uses and the chain become one group."""
        sources = self._chains[chain].sources
        near = [group for group in groups if not group.isdisjoint(sources)]
        return [*(group for group in groups if group not in near), set().union({chain}, *near)]

    def _packed(self, groups: Sequence[set[int]], stop: int) -> tuple[float, dict[int, int]]:
        """Pack groups of chains onto planes; return (seconds of this divided region, chain -> plane).

        Args:
            groups: all chains of the region; groups use no values of each other.
            stop: the first chain after the region.
        """
        chains = self._chains
        loads, sent = [0.0] * self._planes, [0] * self._planes
        owners: dict[int, int] = {}

        def group_s(group: set[int]) -> float:
            return sum(chains[number].seconds for number in group)

        # The longest first; equal ones by number, because all ranks must pack alike.
        for group in sorted(groups, key=lambda group: (-group_s(group), min(group))):
            plane = loads.index(min(loads))
            loads[plane] += group_s(group)
            sent[plane] += sum(chains[number].sent_bytes for number in group if self._last_user[number] >= stop)
            owners.update(dict.fromkeys(group, plane))
        peers = self._planes - 1
        # A plane sends its values to each peer and receives those of all others: whichever is more takes the time.
        most = max(max(peers * own, sum(sent) - own) for own in sent)
        exchange_s = self._latency_s * peers + most / self._bytes_per_s if most else 0.0
        # Values go forward, and their cotangents backward.
        return max(loads) + 2 * exchange_s, owners
