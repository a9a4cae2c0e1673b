"""What a stage holds while each of its operators runs backward: memory in the order in which it is freed.

    forward     a ──▶ b ──▶ c ──▶ d      each keeps what its backward needs: it adds up
    backward    a ◀── b ◀── c ◀── d      each frees what it has kept, and makes the cotangents of its inputs

                                                         maps                     gradients
    while c runs backward      kept by a, b and c; the cotangent of what c made        of d
    while a runs backward      kept by a; the cotangent of what a made             of b, c and d

A forward holds less than the backward of the same operator: where a value is still needed in forward, its cotangent is
there in backward. Maps are divided among the ranks of a stage and weights are not, so which operator holds most depends
on the number of ranks: ``Peak`` has all that may.

Of a backward in two parts, the first frees what only maps need, and keeps what weights do; the second makes the
gradients of weights that are apart, from the last operator to the first::

                                   maps                                                       gradients
    while c runs its first part    kept by a, b and c; cotangents; input and cotangent of d   of weights not apart
    while c runs its second part   inputs and cotangents of a, b and c                        these, and of d

The rules were found with PyTorch's memory profiler; ``tests/hyfi_core/cost/memory/test_lifetimes.py`` compares with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from hyfi_core.capture.program import Operator, Program
from hyfi_core.capture.stages import active_values
from hyfi_core.cost.operators import value_bytes
from hyfi_core.rules.table import facts_of

_INDEX_BYTES = 8
"""Size of the index of a maximum."""
_BLOCK = 16
"""Channels of a group are padded to a multiple of this while a convolution runs backward on a CPU."""


class Held(NamedTuple):
    """Bytes that a stage holds at one moment: maps, on all ranks together, and weights, on each rank."""

    maps: int
    weights: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a stage holds while its operators run backward, for any number of ranks.

    Attributes:
        points: what the stage holds while an operator runs: only points that may be the most on some number of ranks.
        throughout: bytes of maps that are there in addition, whichever operator runs.
        second: peak of the second part of a backward; None: the backward has one part.
    """

    points: tuple[Held, ...]
    throughout: int = 0
    second: Peak | None = None

    @classmethod
    def of(cls, points: Iterable[Held], throughout: int = 0) -> Peak:
        """Return the peak of operators, from what each of them holds."""
        frontier: list[Held] = []
        # By falling bytes of maps: a point with fewer bytes of maps counts only if it has more bytes of weights.
        for point in sorted(set(points), reverse=True):
            if not frontier or point.weights > frontier[-1].weights:
                frontier.append(point)
        return cls(tuple(frontier), throughout)

    def bytes(self, ranks: int) -> int:
        """Return the bytes on one of ``ranks`` ranks."""
        most = max((point.maps // ranks + point.weights for point in self.points), default=0)
        return max(self.throughout // ranks + most, 0 if self.second is None else self.second.bytes(ranks))


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What one operator adds to the memory of its stage.

    Attributes:
        kept: value -> bytes that the operator keeps from forward to backward; a value that several keep has one name.
        makes: bytes of maps that its backward makes: cotangents of inputs, and temporary maps.
        reorders: bytes of temporary copies of weights and gradients while its backward runs.
        gradients: bytes of the weights that no later operator uses: their gradients do not exist before its backward.
        between: value -> bytes that it keeps between the two parts of a backward: input maps, cotangent of its result.
        first_reorders: as ``reorders``, in the first of two parts, which leaves the gradients of weights to the second.
    """

    kept: Mapping[str, int]
    makes: int
    reorders: int
    gradients: int
    between: Mapping[str, int] = field(default_factory=dict)
    first_reorders: int = 0

    @property
    def gradients_apart(self) -> int:
        """Bytes of the gradients that the second part of a backward makes; 0 if the first part makes all."""
        return self.gradients if self.between else 0


NOTHING = Lifetime({}, 0, 0, 0)


class Lifetimes:
    """What each operator of a captured model adds to the memory of its stage.

    Args:
        program: the captured model, of one micro-batch.

    Attributes:
        active: values that carry gradients.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[str, Lifetime] = {}  # by operator
        # Values that are in memory anyway, and are no maps.
        self._fixed = {*program.parameters, *program.buffers, *program.constants}
        self.active = active_values(program, program.outputs, program.parameters)
        views = (op for op in program.operators if facts_of(op).kind == "view")
        # Result of a view -> the value whose memory it shares.
        self._viewed = {name: op.inputs[0] for op in views for name in op.outputs if name}
        # The last user of each value, as it overwrites earlier ones: its backward is the first that makes the gradient.
        self._last_user = {name: op.name for op in program.operators if self._is_active(op) for name in op.inputs}

    def of(self, op: Operator) -> Lifetime:
        """Return what an operator adds; nothing if no gradient goes through it."""
        if op.name not in self._known:
            self._known[op.name] = self._of(op) if self._is_active(op) else NOTHING
        return self._known[op.name]

    def _of(self, op: Operator) -> Lifetime:
        weights = {name for name in op.inputs if name in self._program.parameters and self._last_user[name] == op.name}
        gradients = sum(value_bytes(self._program, name) for name in weights)
        between, reorders = self._between(op), self._reorders(op)
        of_kernel = self._kernels_bytes(op) if between else reorders
        return Lifetime(self._kept(op), self._makes(op), reorders, gradients, between, of_kernel)

    def _between(self, op: Operator) -> dict[str, int]:
        """Return value -> bytes that an operator keeps between the two parts of a backward.

        A product keeps its inputs and its result's cotangent, from which the second part makes the gradients of
        weights. Other operators have all gradients after the first part, and keep nothing.
        """
        parameters, values = self._program.parameters, self._program.values
        if not facts_of(op).product or not any(n in parameters and len(values[n].shape) > 1 for n in op.inputs):
            return {}
        maps = {name for name in op.inputs if name in values} - self._fixed
        if not maps:  # a product of weights, whose gradient goes on
            return {}
        sizes = {name: value_bytes(self._program, name) for name in map(self._memory_of, maps)}
        sizes |= self._converted(op)
        return sizes | {f"{op.name} cotangent": value_bytes(self._program, op.first_output)}

    def carried(self, names: Iterable[str | None]) -> set[str]:
        """Return the values among ``names`` that carry gradients and are not parameters."""
        return {name for name in names if name in self.active and name is not None} - self._program.parameters.keys()

    def of_stage(
        self, operators: Sequence[Operator], leaving: Collection[str], entering: int, in_two: bool = False
    ) -> tuple[Peak, Peak]:
        """Return the peaks of a stage's (first backward of a step, later backwards).

        Args:
            operators: the operators of the stage, in forward order.
            leaving: values that other stages or the caller of the model use.
            entering: bytes of the values of other stages that carry gradients.
            in_two: whether backwards have two parts; a peak is then the larger of both.
        """
        names = {name for op in operators for name in op.inputs if name in self._program.parameters}
        weights = later_gradients = sum(value_bytes(self._program, name) for name in names)
        held = list(self._held(operators, leaving))
        if in_two:
            return self._in_two(held, weights, entering)
        first, later = list[Held](), list[Held]()
        for maps, adds in held:
            # In the first backward, only the gradients of later operators exist: their backward has run before.
            later_gradients -= adds.gradients
            first.append(Held(maps, later_gradients + adds.reorders))
            later.append(Held(maps, weights + adds.reorders))
        return Peak.of(first, entering), Peak.of(later, entering)

    def _in_two(self, held: Sequence[tuple[int, Lifetime]], weights: int, entering: int) -> tuple[Peak, Peak]:
        """Return the peaks of a stage's (first backward of a step, later backwards), which have two parts.

        Each is the peak of first parts, with that of second parts as its ``second``. First parts of other micro-batches
        may run between the two parts.

        Args:
            held: (bytes of maps while an operator runs backward in one part, what the operator adds), for each.
            weights: bytes of all weights of the stage.
            entering: bytes of the values of other stages that carry gradients.
        """
        # Of this operator and those before it in the list: what they keep between the two parts, and the bytes of the
        # gradients that their second parts make, which do not exist before the first backward.
        between: dict[str, int] = {}
        new_gradients = 0
        first_parts, second_parts = list[Held](), list[tuple[int, int, int]]()
        for maps, adds in held:
            between |= adds.between
            new_gradients += adds.gradients_apart
            between_bytes = sum(between.values())
            # ``throughout`` counts what all operators keep between the parts. While this one runs, it and the earlier
            # operators do not keep that yet: subtract it here.
            first_parts.append(Held(max(0, maps - between_bytes), adds.first_reorders))
            second_parts.append((between_bytes, new_gradients, adds.reorders if adds.between else 0))
        throughout = entering + sum(between.values())
        # In the first backward, no second part has made its gradients yet; in later ones, all of them are there.
        first, later = (
            [Held(maps, lasting + reorders) for maps, reorders in first_parts]
            for lasting in (weights - new_gradients, weights)
        )
        second = Peak.of(
            (Held(maps, weights - missing + reorders) for maps, missing, reorders in second_parts), entering
        )
        last = Peak.of((Held(maps, weights + reorders) for maps, _, reorders in second_parts), entering)
        return (
            replace(Peak.of(first, throughout), second=second),
            replace(Peak.of(later, throughout), second=last),
        )

    def _held(self, operators: Sequence[Operator], leaving: Collection[str]) -> Iterator[tuple[int, Lifetime]]:
        """Yield (bytes of all maps while it runs backward, what it adds) for each operator, in forward order.

        Maps are what it and earlier operators keep, the cotangents that exist by then, and what its backward makes.
        """
        last = {name: at for at, op in enumerate(operators) for name in op.inputs}
        saved, cotangents, maps = dict[str, int](), dict[str, int](), 0
        for at, op in enumerate(operators):
            adds = self.of(op)
            # By name: a value that several operators keep counts once.
            maps += sum(size for name, size in adds.kept.items() if name not in saved)
            saved |= adds.kept
            for name in self.carried(op.outputs):
                # A cotangent exists from the backward of the value's last user on; from the start if the value leaves.
                if name in leaving or last.get(name, at) > at:
                    cotangents[name] = value_bytes(self._program, name)
                    maps += cotangents[name]
            # The cotangents of its inputs begin with its backward: later in backward is earlier in this list.
            for name in {name for name in op.inputs if last[name] == at}:
                maps -= 0 if name in leaving else cotangents.pop(name, 0)
            yield maps + adds.makes, adds

    def _is_active(self, op: Operator) -> bool:
        return any(name in self.active for name in op.outputs)

    def _kept(self, op: Operator) -> dict[str, int]:
        sizes = {name: value_bytes(self._program, name) for name in map(self._memory_of, self._kept_values(op))}
        if facts_of(op).keeps == "inputs and places":
            sizes[f"{op.name} places"] = _INDEX_BYTES * prod(self._program.values[op.first_output].shape)
        return sizes | self._converted(op)

    def _converted(self, op: Operator) -> dict[str, int]:
        """Return copy -> bytes of weights in autocast's dtype, which a micro-batch keeps from forward to backward."""
        if not facts_of(op).product:
            return {}
        values = self._program.values
        dtype = values[op.first_output].dtype
        weights = [name for name in op.inputs if name in self._program.parameters]
        narrower = [name for name in weights if dtype.itemsize < values[name].dtype.itemsize]
        return {f"{name} as {dtype}": prod(values[name].shape) * dtype.itemsize for name in narrower}

    def _kept_values(self, op: Operator) -> set[str]:
        """Return the values that an operator keeps for backward, without parameters, buffers and constants."""
        keeps = facts_of(op).keeps
        if keeps == "nothing":
            return set()
        outputs = {name for name in op.outputs if name is not None}
        inputs = {name for name in op.inputs if name in self._program.values}
        if keeps == "other factors":
            # A factor is kept for the gradient of another factor, and x in x · x.
            active = Counter(name for name in op.inputs if name in self.active)
            inputs = {name for name in inputs if active.keys() - {name} or active[name] > 1}
        if keeps == "outputs":
            return outputs
        return (inputs | outputs if keeps == "inputs and outputs" else inputs) - self._fixed

    def _memory_of(self, name: str) -> str:
        """Return the value whose memory a value uses: another one if it is a view, else itself."""
        while name in self._viewed:
            name = self._viewed[name]
        return name

    def _makes(self, op: Operator) -> int:
        """Return the bytes of the maps that an operator's backward makes: the cotangents of its inputs."""
        facts = facts_of(op)
        if facts.passes_on:
            return 0
        cotangent_bytes = sum(value_bytes(self._program, name) for name in self.carried(op.inputs))
        # The cotangent of a norm is computed through a temporary map.
        return 2 * cotangent_bytes if facts.kind == "norm" else cotangent_bytes

    def _reorders(self, op: Operator) -> int:
        """Return the bytes of the temporary gradients of a product's weights, before they are added to the old ones.

        For each weight::

            always                                the new gradient
            narrower result (autocast)            and the gradient in the result's dtype, from which it is converted
            else, convolution, window > 1 pixel   and two copies in other memory orders, one in blocks of channels

        Under autocast there are copies in other orders, too, but they are freed before the gradient is converted.
        """
        if not facts_of(op).product:
            return 0
        total, item = 0, self._kernel_item(op)
        for name in (name for name in op.inputs if name in self._program.parameters):
            weight = self._program.values[name]
            total += value_bytes(self._program, name)
            if item < weight.dtype.itemsize:
                total += prod(weight.shape) * item
            elif prod(weight.shape[2:]) > 1:
                total += value_bytes(self._program, name) + self._blocked_bytes(op, name)
        return total

    def _kernel_item(self, op: Operator) -> int:
        """Return the bytes of one number in a product's kernels: they compute in the dtype of its result."""
        return self._program.values[op.first_output].dtype.itemsize

    def _kernels_bytes(self, op: Operator) -> int:
        """Return the bytes of the copies of a convolution's weights in the memory order that its backward needs."""
        weights = (name for name in op.inputs if name in self._program.parameters)
        return sum(self._blocked_bytes(op, name) for name in weights if prod(self._program.values[name].shape[2:]) > 1)

    def _blocked_bytes(self, op: Operator, weight: str) -> int:
        """Return the bytes of a convolution's weight after padding each group to whole blocks of channels."""
        out_channels, in_channels, *window = self._program.values[weight].shape
        item = min(self._kernel_item(op), self._program.values[weight].dtype.itemsize)
        groups = max(1, self._program.values[op.inputs[0]].shape[1] // in_channels)
        padded_channels = (-(-count // _BLOCK) * _BLOCK for count in (out_channels // groups, in_channels))
        return groups * prod(padded_channels) * prod(window) * item
