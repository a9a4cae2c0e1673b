"""Reuse: which cotangents may be overwritten, decided before the run.

The tape's backward is simulated once with numbers instead of tensors: each number stands for a piece of memory.

    backward of           gives                            held after it
    a + b                 the cotangent itself, twice      a: 1, b: 1       neither may be overwritten
    norm, which took a    new memory                       x: 2, b: 1       only b has memory 1: it may be
    relu, which took b    memory 1, overwritten            x: 2, c: 3       both may be

After an overwrite, the memory gets a new number: no other value had the old one. A value may have several numbers: any
of these may be its memory. Unknown memory (of an operator with unknown backward, a gradient that stays with a
parameter, the cotangent of the output, which the user's loss may keep) is *shared*: never overwritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hyfi_core.capture.program import ValueInfo
from hyfi_core.ops.base import AsyncBackward, LocalSplitBackward, SplitBackward
from hyfi_core.ops.max_pool import MaxPool, WholeMaxPool
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.ops.relu import Relu
from hyfi_core.rules.instructions import CollectiveCall, CustomCall, LocalCall
from hyfi_core.rules.table import facts_of

Memory = frozenset[int]
"""Numbers of pieces of memory; none for a missing cotangent."""

Over = Literal["held", "new"]
"""Which of two cotangents is overwritten by their sum: the existing or the new one."""

_NOTHING: Memory = frozenset()


@dataclass(frozen=True)
class TapeFacts:
    """Facts about a tape that the analysis needs, besides its steps.

    Attributes:
        active: values that carry a gradient.
        parameters: values whose gradients stay, with the parameter.
        outputs: outputs of the program, whose cotangents come from the user's loss.
        exits: values whose cotangents come from other stages, in memory that is handed over.
        values: shape and type of every value.
    """

    active: Collection[str]
    parameters: Collection[str]
    outputs: Collection[str]
    exits: Collection[str]
    values: Mapping[str, ValueInfo]


@dataclass(frozen=True)
class _Cotangent:
    """A cotangent that is held.

    Attributes:
        memory: pieces of memory in which it may be.
        certain: whether it always exists; autograd omits some.
    """

    memory: Memory
    certain: bool


class BackwardMemory:
    """Simulates a tape's backward, step by step, and decides what may be overwritten.

    Args:
        facts: what is known of the tape before the run.
        to_end: whether deferred gradients are computed after the whole tape, not before a norm waits.
    """

    def __init__(self, facts: TapeFacts, to_end: bool = False) -> None:
        self._facts, self._to_end = facts, to_end
        self._pieces = 0  # number of pieces of memory so far: a number stands for each
        self._shared: set[int] = set()  # pieces that others may hold, too: never overwritten
        self._deferred: Memory = _NOTHING  # pieces that gradients of weights will still read
        self._held: dict[str, _Cotangent] = {}  # value -> its cotangent, until the backward of what has made the value
        # Backward begins with the cotangents of the values that leave the stage; any of them may be missing, so none is
        # certain. Those from other stages are held only here, but the user's loss may keep those of the outputs.
        for name in facts.exits:
            self._held[name] = _Cotangent(self._new(), certain=False)
        for name in facts.outputs:
            self._held[name] = _Cotangent(self._given_to_others(self._new()), certain=False)

    def operator(self, call: CustomCall | CollectiveCall) -> tuple[bool, dict[str, Over]]:
        """Simulate the backward of an operator that does not use autograd.

        Returns:
            Whether it may overwrite its first output's cotangent; input -> which of two added cotangents may be
            overwritten by their sum.
        """
        active, operator = self._facts.active, call.operator
        if not any(name in active for name in call.inputs):
            return False, {}
        of_outputs = [self._pop(name) for name in call.outputs]
        memories = [item.memory for item in of_outputs]
        # The operator's other outputs could share the memory, too.
        may_overwrite = bool(memories) and self._alone(memories[0], (*self._memories(), *memories[1:]))
        everything = _NOTHING.union(*memories)
        if isinstance(operator, (SplitBackward, LocalSplitBackward)):
            self._deferred |= everything  # its weight gradient may be computed later, from the same cotangent
        elif isinstance(operator, AsyncBackward) and not self._to_end:
            self._deferred = _NOTHING  # deferred gradients have been computed
        returns_own = getattr(operator, "own_cotangents", False)
        of_inputs = []
        for name in call.inputs:
            if name is not None and name in active:
                if returns_own:
                    memory = self._new()
                elif isinstance(operator, Redistribute):  # nothing is moved: the cotangent is passed through
                    memory = everything
                else:
                    # Nothing is known of this operator's backward: it may return its cotangent, or keep it.
                    memory = self._given_to_others(everything | self._new())
                # Whether the input gets a cotangent for sure: if no output has one, no input gets one.
                certain = returns_own and any(item.certain for item in of_outputs)
                of_inputs.append((name, _Cotangent(memory, certain)))
        return may_overwrite, self._add(of_inputs)

    def segment(self, calls: Iterable[LocalCall], inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, Over]:
        """Simulate the backward of a segment, by autograd.

        Returns:
            Input -> which of two added cotangents may be overwritten by their sum, if one is held for it already.
        """
        cotangents = {name: self._pop(name) for name in outputs if name in self._held}
        for call in reversed(tuple(calls)):
            of_outputs = [cotangents.pop(name) for name in call.outputs if name in cotangents]
            if of_outputs:
                memory = _NOTHING.union(*(item.memory for item in of_outputs))
                self._local(call, _Cotangent(memory, any(item.certain for item in of_outputs)), cotangents)
        return self._add([(name, cotangents[name]) for name in inputs if name in cotangents])

    def _local(self, call: LocalCall, of_output: _Cotangent, cotangents: dict[str, _Cotangent]) -> None:
        """Set the cotangents of a local call's inputs in ``cotangents``; ``of_output``: that of its outputs."""
        # Autograd sums the two gradients of x in x * x before anyone sees them.
        for name in dict.fromkeys(call.inputs):
            if name not in self._facts.active:
                continue
            origin = self._origin(call, name)
            memory = of_output.memory if origin == "given" else self._new()
            # The gradient may be the cotangent itself, a view of it or a tensor that PyTorch keeps.
            if origin == "unknown":
                memory = self._given_to_others(memory | of_output.memory)
            if name in self._facts.parameters:
                self._given_to_others(memory)  # to its ``grad``, and to hooks on it
                continue
            # A call that is skipped on this rank gives no gradient.
            certain = of_output.certain and origin != "unknown" and call.empty is None
            if name in cotangents:  # autograd adds into memory without other references, or into new memory
                memory, certain = self._new(), certain or cotangents[name].certain
            cotangents[name] = _Cotangent(memory, certain)

    def _origin(self, call: LocalCall, name: str) -> Literal["own", "given", "unknown"]:
        """Return where autograd puts an input's gradient: in new memory (own) or in the output's cotangent (given)."""
        op = call.source
        if op is None:
            return "unknown"
        gradient = facts_of(op).gradient
        if gradient == "new":
            return "own"
        if gradient == "same" and call.outputs[0] is not None:
            values = self._facts.values
            # Broadcast operands get a sum over the expanded dims, in new memory.
            return "given" if values[name].shape == values[call.outputs[0]].shape else "own"
        return "unknown"

    def _add(self, arriving: list[tuple[str, _Cotangent]]) -> dict[str, Over]:
        """Hold cotangents, each added to the one of the same value that is held already, if any.

        Args:
            arriving: (value, its cotangent), in the order in which ``BackwardPass._add`` adds them.

        Returns:
            Value -> which of the two cotangents may be overwritten by their sum, the ``held`` or the ``new`` one.
        """
        sums: dict[str, Over] = {}
        times = Counter(name for name, _ in arriving)
        while arriving:
            name, addend = arriving.pop(0)
            if name in self._facts.parameters:
                self._given_to_others(addend.memory)  # the parameter's ``grad``
                continue
            if name in self._held:
                present = self._pop(name)
                # The cotangents that are still in the list occupy memory, too.
                elsewhere = (*self._memories(), *(later.memory for _, later in arriving))
                total = self._new()
                # One decision serves all sums of a name, so there must be only one in this step.
                if times[name] == 1 and self._alone(present.memory, (*elsewhere, addend.memory)):
                    sums[name], total = "held", present.memory
                elif times[name] == 1 and self._alone(addend.memory, (*elsewhere, present.memory)):
                    sums[name], total = "new", addend.memory
                # If one of the two does not exist, the other is passed on.
                total |= _NOTHING if present.certain else addend.memory
                total |= _NOTHING if addend.certain else present.memory
                addend = _Cotangent(total, present.certain or addend.certain)
            self._held[name] = addend
        return sums

    def _alone(self, memory: Memory, memories: Iterable[Memory]) -> bool:
        """Whether only one value can be in this memory."""
        # No memory: there is no cotangent, and the operator makes zeros of its own.
        if not memory or not memory.isdisjoint(self._shared) or not memory.isdisjoint(self._deferred):
            return False
        return all(memory.isdisjoint(used) for used in memories)

    def _pop(self, name: str | None) -> _Cotangent:
        missing = _Cotangent(_NOTHING, certain=False)
        return missing if name is None else self._held.pop(name, missing)

    def _memories(self) -> Iterable[Memory]:
        return [item.memory for item in self._held.values()]

    def _new(self) -> Memory:
        self._pieces += 1
        return frozenset((self._pieces,))

    def _given_to_others(self, memory: Memory) -> Memory:
        self._shared |= memory
        return memory


def writing_over(
    call: CustomCall | CollectiveCall, may_overwrite: bool, computed: Collection[str | None]
) -> CustomCall | CollectiveCall:
    """Return the call with an operator that overwrites cotangents where allowed.

    Args:
        call: any.
        may_overwrite: whether the cotangent of its first output may be overwritten.
        computed: values that the tape computes; other memory belongs to the caller.
    """
    operator = call.operator
    if isinstance(operator, (Relu, BatchNorm)) and operator.overwrites_cotangent != may_overwrite:
        return replace(call, operator=replace(operator, overwrites_cotangent=may_overwrite))  # type: ignore[arg-type]
    # A max pool may write its input's cotangent over the input, but not over the caller's memory.
    if isinstance(operator, (MaxPool, WholeMaxPool)) and operator.overwrites_map and call.inputs[0] not in computed:
        return replace(call, operator=replace(operator, overwrites_map=False))  # type: ignore[arg-type]
    return call
