"""The lowered program: what one rank does, in the order that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hyfi_core.capture.program import Operator, Program, ValueInfo, refs_in
from hyfi_core.ops.base import Collective
from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout

NO_MESSAGES = "none"


@dataclass(frozen=True, slots=True)
class Split:
    """A value of which every rank holds its part.

    Attributes:
        layout: who holds what.
        dims: which tensor dims are (y, x).
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
    def owned(self) -> Split:
        """The same without margins."""
        return Split(self.layout, self.dims)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s tensor of a value of this global shape."""
        sides = list(shape)
        sides[self.dims[0]], sides[self.dims[1]] = self.held[rank].shape
        return tuple(sides)


@dataclass(frozen=True, slots=True)
class Compute:
    """A local call, differentiated by autograd.

    Attributes:
        function: takes the inputs, returns one tensor or as many as there are outputs.
        inputs: value names.
        outputs: value names; None for a result that nothing uses.
        empty: shapes to return without a call where this rank owns nothing of the result; None: always call.
        operator: the operator of the model that this call is, where it is one; its values may have other names here.
    """

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    empty: tuple[tuple[int, ...], ...] | None = None
    operator: Operator | None = None


@dataclass(frozen=True, slots=True)
class Communicate:
    """An operator with a backward of its own. If it communicates, every rank of the stage is there, whatever it owns.

    Attributes:
        collective: what it does.
        inputs: value names.
        outputs: value names; None for a result that nothing uses.
        kind: what traffic counts it as; ``NO_MESSAGES`` where it sends none.
        copies: whether the ranks of the stage in all replicas take part, not only those of one.
    """

    collective: Collective
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    kind: str
    copies: bool = False


Instruction = Compute | Communicate


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
    """

    instructions: tuple[Instruction, ...]
    read_box: Box
    splits: Mapping[str, Split]
    outputs: tuple[Any, ...]
    program: Program
    values: Mapping[str, ValueInfo]
    exits: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all values that are needed after the run: answer, exits and new buffers."""
        return (*refs_in(self.outputs), *self.exits, *self.program.mutations.values())

    def floating(self, name: str) -> bool:
        """Whether a value can carry a gradient."""
        info = self.values.get(name)
        return info is None or info.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
