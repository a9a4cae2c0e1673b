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
    holds the pixels of its part, row after row of the part. A dim of space may also hold several maps, one after the
    other, as ``x.view(B * H * W, C)`` does: of each of them a rank holds its part.

    Attributes:
        layout: who holds what.
        dims: which tensor dims are (y, x); the same one twice where the value is flat.
        boxes: what each rank holds, where a fused run has it compute more than its part; None: its part.
        leads: how many maps follow each other in these dims; (n, 1) for n maps in a flat dim.
    """

    layout: Layout
    dims: tuple[int, int] = (2, 3)
    boxes: tuple[Box, ...] | None = None
    leads: tuple[int, int] = (1, 1)

    @property
    def held(self) -> tuple[Box, ...]:
        """The box of each rank's tensor: its part, and in a fused run perhaps a margin that others own."""
        return self.layout.parts if self.boxes is None else self.boxes

    @property
    def flat(self) -> bool:
        """Whether height and width lie in one tensor dim."""
        return self.dims[0] == self.dims[1]

    @property
    def plain(self) -> bool:
        """Whether height and width are tensor dims of their own and nothing else."""
        return not self.flat and self.leads == (1, 1)

    @property
    def space(self) -> tuple[Box, tuple[int, int], bool]:
        """What the dims of space hold, wherever they are: equal for values whose pixels stand beside each other."""
        return self.layout.map, self.leads, self.flat

    @property
    def sides(self) -> tuple[int, int]:
        """Global sizes of the tensor dims ``dims``."""
        height, width = self.layout.map.shape
        size = self.leads[0] * height * width
        return (size, size) if self.flat else (self.leads[0] * height, self.leads[1] * width)

    def opened(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return (shape, dims of space) of a value of this shape with height and width as dims of their own."""
        return self._opened(shape, self.layout.map.shape)

    def opened_here(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s tensor, of a value of this global shape, opened likewise."""
        return self._opened(shape, self.held[rank].shape)[0]

    def _opened(self, shape: tuple[int, ...], sides: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, int]]:
        result: list[int] = []
        dims = [0, 0]
        for at, side in enumerate(shape):
            axes = [axis for axis in (0, 1) if self.dims[axis] == at]
            if not axes:
                result.append(side)
                continue
            if self.leads[axes[0]] != 1:
                result.append(self.leads[axes[0]])
            for axis in axes:
                dims[axis] = len(result)
                result.append(sides[axis])
        return tuple(result), (dims[0], dims[1])

    def folded(self) -> tuple[tuple[int, int], ...]:
        """Return (first, last) dims of the opened value that are one dim here, from the last such dim to the first."""
        found, more = [], 0
        for dim in sorted(set(self.dims)):
            axes = [axis for axis in (0, 1) if self.dims[axis] == dim]
            inner = len(axes) - 1 + (self.leads[axes[0]] != 1)
            if inner:
                found.append((dim + more, dim + more + inner))
            more += inner
        return tuple(reversed(found))

    @property
    def owned(self) -> Split:
        """The same without margins."""
        return Split(self.layout, self.dims, leads=self.leads)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s tensor of a value of this global shape."""
        sides, box = list(shape), self.held[rank]
        if self.flat:
            sides[self.dims[0]] = self.leads[0] * box.area
        else:
            sides[self.dims[0]], sides[self.dims[1]] = self.leads[0] * box.height, self.leads[1] * box.width
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
        fusible: operators whose rules can compute more than what a rank owns: they may be part of a fused run.
        gathered: what ranks gather whole for operators that cannot be computed by parts, as text for people.
        drawn: operators that draw from torch's own generator; computed again they would draw other numbers.
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
    drawn: tuple[Operator, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all values that are needed after the run: answer, exits and new buffers."""
        return (*refs_in(self.outputs), *self.exits, *self.program.mutations.values())

    def floating(self, name: str) -> bool:
        """Whether a value can carry a gradient."""
        info = self.values.get(name)
        return info is None or info.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
