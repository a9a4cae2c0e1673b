"""The lowered program: what one rank does, in the order that all ranks share.

An instruction says what it is:

    LocalCall         a function of this rank's values; autograd differentiates it
    CustomCall        a function with a backward of its own; no message
    CollectiveCall    the same with messages: every rank of the stage is there, whatever it owns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hyfi_core.capture.program import Operator, Program, ValueInfo, refs_in
from hyfi_core.ops.base import Collective, CustomOperator
from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout

Traffic = Literal["halo", "reduce"]
"""What messages are counted as: pixels of neighbours, or sums over the map."""


@dataclass(frozen=True, slots=True)
class Split:
    """A value of which every rank holds its part.

    A *flat* value has height and width in one tensor dim, row after row, as ``x.flatten(2)`` leaves it: there each rank
    holds the pixels of its part, row after row of the part.

    Attributes:
        layout: who holds what.
        dims: which tensor dims are (y, x); the same one twice where the value is flat.
        boxes: what each rank holds, where a fused run has it compute more than its part; None: its part.
    """

    layout: Layout
    dims: tuple[int, int] = (2, 3)
    boxes: tuple[Box, ...] | None = None

    @property
    def held(self) -> tuple[Box, ...]:
        """The box of each rank's tensor: its part, and in a fused run perhaps a margin that others own."""
        return self.layout.parts if self.boxes is None else self.boxes

    @property
    def flat(self) -> bool:
        """Whether height and width lie in one tensor dim."""
        return self.dims[0] == self.dims[1]

    def opened(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return (shape, dims of space) of a value of this shape with height and width as dims of their own."""
        if not self.flat:
            return shape, self.dims
        dim = self.dims[0]
        return (*shape[:dim], *self.layout.map.shape, *shape[dim + 1 :]), (dim, dim + 1)

    @property
    def owned(self) -> Split:
        """The same without margins."""
        return Split(self.layout, self.dims)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s tensor of a value of this global shape."""
        sides, box = list(shape), self.held[rank]
        if self.flat:
            sides[self.dims[0]] = box.area
        else:
            sides[self.dims[0]], sides[self.dims[1]] = box.shape
        return tuple(sides)


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A function of this rank's values, differentiated by autograd.

    Attributes:
        function: takes the inputs, returns one tensor or as many as there are outputs.
        inputs: value names.
        outputs: value names; None for a result that nothing uses.
        empty: what to return, of which shape and type, without a call where this rank owns nothing of the result; None:
            always call.
        source: the operator of the model that this call is, where it is one; its values may have other names here.
    """

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    empty: tuple[ValueInfo, ...] | None = None
    source: Operator | None = None


@dataclass(frozen=True, slots=True)
class CustomCall:
    """An operator with a backward of its own that sends nothing.

    Attributes:
        operator: what it does.
        inputs: value names; None for an input that it does without.
        outputs: value names; None for a result that nothing uses.
    """

    operator: CustomOperator
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """An operator with a backward of its own that talks to other ranks.

    Attributes:
        operator: what it does.
        inputs: value names; None for an input that it does without.
        outputs: value names; None for a result that nothing uses.
        traffic: what its messages are counted as.
        all_replicas: whether the ranks of the stage in all replicas take part, not only those of one.
    """

    operator: Collective
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    traffic: Traffic
    all_replicas: bool = False


Instruction = LocalCall | CustomCall | CollectiveCall


@dataclass(frozen=True)
class RankProgram:
    """One rank's share of a program.

    Attributes:
        instructions: what it does.
        read_box: the box of the image that it starts from, clipped to the image.
        splits: how each split value is laid out; a value that is not in it is replicated.
        outputs: the leaves of the model's answer, gathered where they were split.
        program: what it was lowered from.
        values: shapes of the program's values and of those that lowering made.
        exits: values that other stages need; a split one leaves as its parts.
        fusible: operators whose rules can compute more than what a rank owns: they may stand inside a fused run.
        gathered: what ranks gather whole for operators that cannot be computed by parts, as text for people.
    """

    instructions: tuple[Instruction, ...]
    read_box: Box
    splits: Mapping[str, Split]
    outputs: tuple[Any, ...]
    program: Program
    values: Mapping[str, ValueInfo]
    exits: tuple[str, ...] = ()
    fusible: frozenset[str] = frozenset()
    gathered: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all values that are needed after the run: answer, exits and new buffers."""
        return (*refs_in(self.outputs), *self.exits, *self.program.mutations.values())

    def floating(self, name: str) -> bool:
        """Whether a value can carry a gradient."""
        info = self.values.get(name)
        return info is None or info.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
