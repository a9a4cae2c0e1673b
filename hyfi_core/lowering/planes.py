"""One plane's part of a lowered program: without the branches of other planes, with exchanges of their values.

All planes have the instructions of the undivided program in the same order, less those of other planes. A value of
another plane is received before the first instruction, in that order, for which any plane lacks it; all values that are
then ready are exchanged together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from hyfi_core.capture.program import Operator, refs_in
from hyfi_core.errors import RequestError
from hyfi_core.ops.plane_exchange import PlaneExchange, PlaneValue
from hyfi_core.plan.branches import Branches
from hyfi_core.rules.instructions import CollectiveCall, Instruction, RankProgram

_PlaneSet = frozenset[int]


@dataclass(frozen=True)
class Plane:
    """The plane for which a program is lowered, and the format of the values that it receives.

    Attributes:
        branches: which plane computes what.
        index: this plane.
        device: device of values.
        channels_last: whether maps are channels-last.
    """

    branches: Branches = field(default_factory=Branches)
    index: int = 0
    device: str = "cpu"
    channels_last: bool = False

    def ordered(self, operators: Sequence[Operator]) -> Sequence[Operator]:
        """Return the operators in the order in which every plane computes them."""
        order = self.branches.order
        # Stable and the same in all planes: messages between planes have no tags.
        return sorted(operators, key=lambda op: order[op.name]) if order else operators


def on_plane(ranked: RankProgram, plane: Plane, rank: int) -> RankProgram:
    """Return the instructions of one plane.

    Args:
        ranked: the program of a rank, with the operators of all planes in their common order.
        plane: this plane.
        rank: position in the stage's grid.

    Raises:
        RequestError: an operator draws from torch's generator, so that planes would have different numbers.
    """
    if plane.branches.planes == 1:
        return ranked
    if ranked.drawn:
        op = ranked.drawn[0]
        raise RequestError(
            f"{op.text} in module {op.module!r} draws from torch's generator, so that the ranks of plan.branches="
            f"{plane.branches.planes} would draw different numbers; use dropout, bernoulli, rand or randn, or "
            f"plan.branches=1"
        )
    if not plane.branches.owners:
        return ranked
    instructions: list[Instruction] = []
    for step in _steps(ranked, plane, rank):
        if isinstance(step, PlaneExchange):
            sent, received = (tuple(value.name for value in values) for values in (step.sent, step.received))
            # Where only other planes exchange, this one makes no call.
            if sent or received:
                instructions.append(CollectiveCall(step, sent, received, "stage", between_planes=True))
            continue
        instruction, computing = step
        if plane.index in computing:
            instructions.append(instruction)
    # ``of_all_planes``: from the instructions of all planes, each finds the same values that carry gradients.
    return replace(ranked, instructions=tuple(instructions), of_all_planes=ranked.instructions)


def exchanges(ranked: RankProgram, plane: Plane, rank: int) -> list[PlaneExchange]:
    """Return the exchanges of a divided program, with those in which this plane has no part; see ``on_plane``."""
    if not ranked.of_all_planes:
        return []
    undivided = replace(ranked, instructions=ranked.of_all_planes)
    return [step for step in _steps(undivided, plane, rank) if isinstance(step, PlaneExchange)]


def _steps(ranked: RankProgram, plane: Plane, rank: int) -> Iterator[PlaneExchange | tuple[Instruction, _PlaneSet]]:
    """Yield (instruction, planes that compute it) of all planes, and the exchanges between them, in order."""
    computed, used = _where(ranked, plane.branches)
    owner_of: dict[str, int] = {}  # value that other planes need -> the plane that has it
    for index, instruction in enumerate(ranked.instructions):
        if any(
            name in owner_of and computed[index] - {owner_of[name]} for name in instruction.inputs if name is not None
        ):
            yield _exchange(ranked, plane, rank, owner_of, used)
            owner_of = {}
        yield instruction, computed[index]
        for name in instruction.outputs:
            if name is not None and not used[name] <= computed[index]:
                # Where several planes compute a value, the lowest one sends it, so that all planes agree.
                owner_of[name] = min(computed[index])
    # Results of the program, which all planes need, may be left.
    if owner_of:
        yield _exchange(ranked, plane, rank, owner_of, used)


def _where(ranked: RankProgram, branches: Branches) -> tuple[list[_PlaneSet], dict[str, _PlaneSet]]:
    """Return (the planes that compute each instruction, value -> the planes that use it).

    An instruction without owner is computed in all planes that use its results; results of the program are used by all.
    """
    every = frozenset(range(branches.planes))
    owner = {
        name: frozenset((branches.owners[op.name],))
        for op in ranked.program.operators
        if op.name in branches.owners
        for name in op.outputs
        if name is not None
    }
    used: dict[str, _PlaneSet] = {}
    for name in (*refs_in(ranked.outputs), *ranked.exits, *ranked.program.mutations.values()):
        used[name] = every
    computed: list[_PlaneSet] = []
    # Backwards: who needs a result decides who computes it.
    for instruction in reversed(ranked.instructions):
        outputs = [name for name in instruction.outputs if name is not None]
        owners = next((owner[name] for name in outputs if name in owner), None)
        computing = frozenset().union(*(used.get(name, frozenset()) for name in outputs)) if owners is None else owners
        computed.append(computing)
        for name in outputs:
            used.setdefault(name, frozenset())
        for value in instruction.inputs:
            if value is not None:
                used[value] = used.get(value, frozenset()) | computing
    return computed[::-1], used


def _exchange(
    ranked: RankProgram, plane: Plane, rank: int, owner_of: Mapping[str, int], used: Mapping[str, _PlaneSet]
) -> PlaneExchange:
    """Return the exchange of the values in ``owner_of``, each from its plane to the others in ``used``."""
    values = []
    for name, owner in owner_of.items():
        # Ranks at one position of all planes exchange, so that their parts have the same shape.
        info, split = ranked.values[name], ranked.splits.get(name)
        shape = info.shape if split is None else split.local_shape(info.shape, rank)
        values.append(PlaneValue(name, shape, info.dtype, owner, tuple(sorted(used[name] - {owner}))))
    return PlaneExchange(tuple(values), plane.index, torch.device(plane.device), plane.channels_last)
