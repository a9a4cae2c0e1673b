"""The lowered program: the instructions of one rank, in the same order on all ranks.

There are three types of instruction:

    LocalCall         a function of this rank's values; autograd differentiates it
    CustomCall        a function with its own backward, without communication
    CollectiveCall    the same with communication: every rank of the stage takes part
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hyfi_core.capture.program import Operator, Program, ValueInfo, refs_in
from hyfi_core.ops.base import Collective, CustomOperator
from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.layout import Layout

Traffic = Literal["halo", "reduce", "stage"]
"""Kind of traffic in the counts: pixels of neighbours, sums over the map, or whole values of other ranks."""


@dataclass(frozen=True, slots=True)
class Split:
    """A value that is divided: every rank has its part.

    A *flat* value has height and width in one tensor dim, in row-major order, like ``x.flatten(2)``: each rank has the
    pixels of its part, in row-major order of the part. A dim may also contain several maps, one after the other, like
    ``x.view(B * H * W, C)``: each rank has its part of each map.

        tensor                 dims      map counts
        (B, C, H, W)           (2, 3)    (1, 1)    dims of their own
        (B, C, H · W)          (2, 2)    (1, 1)    flat
        (B · H · W, C)         (0, 0)    (B, 1)    flat, in the batch dim

    Attributes:
        layout: the part of each rank.
        dims: which tensor dims are (y, x); twice the same if the value is flat.
        boxes: the box of each rank, if a fused run computes margins; None: its part.
        map_counts: number of maps that each of ``dims`` contains, one after the other; (n, 1) for n in a flat dim.
    """

    layout: Layout
    dims: tuple[int, int] = (2, 3)
    boxes: Boxes | None = None
    map_counts: tuple[int, int] = (1, 1)

    @property
    def held(self) -> Boxes:
        """The box of each rank's tensor: its part or, in a fused run, its part with margins that other ranks own."""
        return self.layout.parts if self.boxes is None else self.boxes

    @property
    def flat(self) -> bool:
        """Whether height and width are one tensor dim."""
        return self.dims[0] == self.dims[1]

    @property
    def is_flat_map(self) -> bool:
        """Whether it is ``(B, C, H · W)``, or the same with other dims behind: one flat map for each channel."""
        return self.dims == (2, 2) and self.map_counts == (1, 1)

    @property
    def in_batch(self) -> bool:
        """Whether its positions are entries of the batch, such as the tiles of an image: dim 0, and no other."""
        return self.dims == (0, 0)

    @property
    def has_own_dims(self) -> bool:
        """Whether height and width are tensor dims of their own, with nothing else in them."""
        return not self.flat and self.map_counts == (1, 1)

    @property
    def pixels(self) -> tuple[Box, tuple[int, int], bool]:
        """(map, map counts, whether flat): equal for values with the same pixels, in any dims."""
        return self.layout.map, self.map_counts, self.flat

    @property
    def sides(self) -> tuple[int, int]:
        """Global sizes of the tensor dims ``dims``."""
        height, width = self.layout.height, self.layout.width
        size = self.map_counts[0] * height * width
        return (size, size) if self.flat else (self.map_counts[0] * height, self.map_counts[1] * width)

    def opened(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return (shape, dims of height and width) of a value of this shape, with height and width as separate dims."""
        return self._opened(shape, self.layout.map.shape)

    def opened_here(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s tensor with height and width as separate dims; ``shape``: the global one."""
        return self._opened(shape, self.held[rank].shape)[0]

    def _opened(self, shape: tuple[int, ...], sides: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Return (shape, dims of height and width) as ``opened``; ``sides``: height and width, of the map or a part."""
        result: list[int] = []
        dims = [0, 0]
        for at, side in enumerate(shape):
            # Both axes if the dim is flat.
            axes = [axis for axis in (0, 1) if self.dims[axis] == at]
            if not axes:
                result.append(side)
                continue
            # Of several maps in one dim, the number of maps is the outermost factor.
            if self.map_counts[axes[0]] != 1:
                result.append(self.map_counts[axes[0]])
            for axis in axes:
                dims[axis] = len(result)
                result.append(sides[axis])
        return tuple(result), (dims[0], dims[1])

    def folded(self) -> tuple[tuple[int, int], ...]:
        """Return which dims of the ``opened`` value to fold so that it has this form again.

        Returns:
            (first, last) of each range of dims to fold into one; the last range first, so that folding one does not
            renumber the next.
        """
        folds, added_before = [], 0
        for dim in sorted(set(self.dims)):
            axes = [axis for axis in (0, 1) if self.dims[axis] == dim]
            # Opened, it is a dim for each axis, and one for the number of maps if there are several.
            added = len(axes) - 1 + (self.map_counts[axes[0]] != 1)
            if added:
                folds.append((dim + added_before, dim + added_before + added))
            added_before += added
        return tuple(reversed(folds))

    @property
    def owned(self) -> Split:
        """This split without margins."""
        return Split(self.layout, self.dims, map_counts=self.map_counts)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s tensor of a value of this global shape."""
        sides, box = list(shape), self.held[rank]
        if self.flat:
            sides[self.dims[0]] = self.map_counts[0] * box.area
        else:
            sides[self.dims[0]], sides[self.dims[1]] = self.map_counts[0] * box.height, self.map_counts[1] * box.width
        return tuple(sides)


class KeepsStatistics(ABC):
    """A function of a local call that computes a few numbers, which a second run of the same forward can use again."""

    @abstractmethod
    def measure(self, *inputs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Return the results, computed without a graph, and the numbers to keep.

        Args:
            inputs: tensors, as for the function.
        """

    @abstractmethod
    def with_known(self, kept: Sequence[torch.Tensor], *inputs: Any) -> Any:
        """Return the results again, by the numbers of the first run; gradients are those of the function itself.

        Args:
            kept: what ``measure`` returned for the same inputs.
            inputs: the inputs of that call.
        """


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A function of this rank's values, differentiated by autograd.

    Attributes:
        function: takes the inputs, returns one tensor or as many as there are outputs.
        inputs: value names.
        outputs: value names; None for a result that nothing uses.
        empty: shapes and dtypes of the results that are returned without a call, because this rank's part is empty;
            None: call.
        source: the corresponding operator of the model, if any; its values may have other names here.
        parts: the calls that were joined into this one; empty for a single call.
    """

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    empty: tuple[ValueInfo, ...] | None = None
    source: Operator | None = None
    parts: tuple[LocalCall, ...] = ()


@dataclass(frozen=True, slots=True)
class CustomCall:
    """An operator with its own backward and without communication.

    Attributes:
        operator: the implementation.
        inputs: value names; None for a missing input.
        outputs: value names; None for a result that nothing uses.
    """

    operator: CustomOperator
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """An operator with its own backward and with communication.

    All ranks call it. Which of them send messages depends on their boxes: with some grids, none do.

    Attributes:
        operator: the implementation.
        inputs: value names; None for a missing input.
        outputs: value names; None for a result that nothing uses.
        traffic: kind of its messages in the counts.
        all_replicas: whether the ranks of the stage in all replicas take part, not only those of one.
        between_planes: whether it is between the ranks with the same position in all planes, not those of the stage.
    """

    operator: Collective
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    traffic: Traffic
    all_replicas: bool = False
    between_planes: bool = False


Instruction = LocalCall | CustomCall | CollectiveCall


@dataclass(frozen=True)
class RankProgram:
    """The program of one rank.

    Attributes:
        instructions: instructions in the order in which they run.
        read_box: the box of the image that it starts from, clipped to the image.
        splits: the layout of each split value; other values are replicated.
        outputs: the leaves of the model's output, gathered if they were split.
        program: the captured program.
        values: shape and dtype of the program's values and of those that lowering added.
        exits: values that other stages need; split ones are sent as parts.
        fusible: operators whose rules can compute margins: they may be part of a fused run.
        gathered: descriptions of the maps that ranks gather.
        drawn: operators that draw from torch's generator, which recomputation would not reproduce.
        of_all_planes: the instructions of all planes; empty if branches are not divided.
        ahead: operators whose results are split as later operators use them.
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
    of_all_planes: tuple[Instruction, ...] = ()
    ahead: frozenset[str] = frozenset()

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all values that are needed after the run: outputs, exits and new buffers."""
        return (*refs_in(self.outputs), *self.exits, *self.program.mutations.values())

    def floating(self, name: str) -> bool:
        """Whether a value can carry a gradient."""
        info = self.values.get(name)
        # A value that is not listed may carry one.
        return info is None or info.differentiable
