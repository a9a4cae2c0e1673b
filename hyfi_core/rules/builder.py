"""The builder: the interface through which rules read a program and emit one rank's instructions.

Every value is *split* (each rank has its part) or *replicated* (each has it whole). Only the builder sets this, adds
values and instructions, and emits the communication between layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch

from hyfi_core.capture.program import KEY, Operator, Program, Ref, ValueInfo
from hyfi_core.errors import GatherError, RequestError
from hyfi_core.ops.base import Collective, CustomOperator
from hyfi_core.ops.cut import cut
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.box import Box, hull
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.fused_runs import FusedRuns
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.parallel_plan import GATHER_BYTES
from hyfi_core.plan.transfer import Transfer, plan_transfer
from hyfi_core.rules.instructions import CollectiveCall, CustomCall, Instruction, LocalCall, RankProgram, Split, Traffic

Rule = Callable[["Builder", Operator], None]
"""The rule of an operator: reads layouts from the builder and emits instructions through it."""

Splits = Split | Sequence[Split | None] | None
"""How the outputs of a call are split: all in the same way, individually, or not at all."""


@dataclass(frozen=True)
class _ImageRead:
    """Placeholder for a box of the image, until all boxes that the rank reads are known."""

    name: str
    need: Box
    fill: float


class Mark(NamedTuple):
    """A state of a builder to which it can be rewound."""

    steps: int
    made: int
    gathered: int
    drawn: int
    fusible: int


class Builder:
    """Builds one rank's instructions.

    Args:
        program: the captured model.
        grid: rows and columns of ranks.
        rank: the rank whose instructions are built.
        entries: values from other stages -> how they are split here, None for a replicated one.
        runs: fused runs, in which ranks compute margins.
        norm_replicas: batch norms take their statistics over this many times the samples of this replica.
        gather_bytes: size of the largest map that every rank may gather for an operator.

    Attributes:
        program: see above.
        grid: see above.
        rank: see above.
        runs: see above.
        norm_replicas: see above.
        gather_bytes: see above.
        splits: the layout of each split value; read only.
        values: global shape and type of every value; read only.
        ahead: operators whose results are split by how later operators use them; rules add them.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int],
        rank: int,
        entries: Mapping[str, Split | None] | None = None,
        runs: FusedRuns | None = None,
        norm_replicas: Fraction | int = 1,
        gather_bytes: int = GATHER_BYTES,
    ) -> None:
        self.program = program
        self.grid = grid
        self.rank = rank
        self.runs = FusedRuns() if runs is None else runs
        self.norm_replicas = norm_replicas
        self.gather_bytes = gather_bytes
        self._values = {**program.values, KEY: ValueInfo((3,), torch.int64)}
        height, width = program.values[program.image].shape[-2:]
        self._splits = {program.image: Split(Layout.even(height, width, grid))}
        self._splits.update({name: split for name, split in (entries or {}).items() if split is not None})
        self.splits: Mapping[str, Split] = MappingProxyType(self._splits)
        self.values: Mapping[str, ValueInfo] = MappingProxyType(self._values)
        self._steps: list[Instruction | _ImageRead] = []  # emitted so far
        self._made: list[str] = []  # names that `fresh` gave
        self._gathered: list[str] = []  # a line about each value that was gathered
        self._drawn: list[Operator] = []  # operators that draw random numbers
        self._fusible: list[str] = []  # names of operators whose rules can compute margins
        self.ahead: set[str] = set()
        self._shared: dict[str, str] = {}  # value -> the name of its part with margins, see `_covering`
        self._cuts: dict[tuple[str, Boxes, float], str] = {}  # (value, boxes, fill) -> name of the cut

    # -- queries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a value."""
        return self.values[name].shape

    def nbytes(self, name: str) -> int:
        """Return the bytes of a value as a whole."""
        return prod(self.values[name].shape) * self.values[name].dtype.itemsize

    def split_of(self, argument: Any) -> Split | None:
        """Return how an argument is split, None for a replicated value or a constant."""
        return self.splits.get(argument.name) if isinstance(argument, Ref) else None

    def with_margins(self, op: Operator, split: Split) -> Split:
        """Return ``split`` with the boxes that ranks compute of an operator's results: in a fused run, with margins.

        Only values whose height and width are separate dims can be part of fused runs.
        """
        if not split.has_own_dims:
            return split.owned
        self._fusible.append(op.name)
        boxes = self.runs.computed.get(op.name)
        return split if boxes is split.boxes else replace(split, boxes=boxes)

    def same_pixels(self, op: Operator, name: str) -> Split:
        """Return the layout of results that have the same pixels as the map ``name``; see ``with_margins``."""
        return self.with_margins(op, self.splits[name])

    def refuse(self, op: Operator, problem: str, alternative: str, kind: type[RequestError] = RequestError) -> NoReturn:
        """Refuse an operator by name.

        Raises:
            RequestError: always, of the given kind.
        """
        where = f" in module {op.module!r}" if op.module else ""
        raise kind(f"{op.text}{where} {problem}; what works: {alternative}")

    # -- emission

    def fresh(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> str:
        """Return a new name for a value derived from ``name``; global shape and dtype are copied unless given."""
        like = self.values[name]
        result = f"{name}~{len(self._made) + 1}"
        self._made.append(result)
        self._values[result] = ValueInfo(like.shape if shape is None else shape, dtype or like.dtype)
        return result

    def compute(
        self,
        function: Callable[..., Any],
        inputs: tuple[str, ...],
        outputs: tuple[str | None, ...],
        split: Splits = None,
        source: Operator | None = None,
    ) -> None:
        """Emit a local call, which a rank skips if its part of a split output is empty.

        Args:
            function: takes the inputs, returns one tensor or as many as there are outputs.
            inputs: value names.
            outputs: value names; None for an unused result.
            split: how the outputs are split.
            source: the operator of the model that this call computes, so that passes can recognise it.
        """
        splits = self._lay_out(outputs, split)
        empty = None
        if any(item is not None and item.held[self.rank].empty for item in splits):
            shapes = zip(outputs, splits, strict=True)
            empty = tuple(self._local_info(o, item) for o, item in shapes)
        self._steps.append(LocalCall(function, inputs, outputs, empty, source))

    def custom(
        self,
        operator: CustomOperator,
        inputs: tuple[str | None, ...],
        outputs: tuple[str | None, ...],
        split: Splits = None,
    ) -> None:
        """Emit an operator with its own backward and without communication."""
        self._lay_out(outputs, split)
        self._steps.append(CustomCall(operator, inputs, outputs))

    def communicate(
        self,
        operator: Collective,
        inputs: tuple[str | None, ...],
        outputs: tuple[str | None, ...],
        traffic: Traffic,
        split: Splits = None,
        all_replicas: bool = False,
    ) -> None:
        """Emit an operator with communication; see ``CollectiveCall``."""
        self._lay_out(outputs, split)
        self._steps.append(CollectiveCall(operator, inputs, outputs, traffic, all_replicas))

    def _lay_out(self, outputs: Sequence[str | None], split: Splits) -> Sequence[Split | None]:
        """Record how outputs are split; return the split of each, None for a replicated one."""
        splits = [split] * len(outputs) if split is None or isinstance(split, Split) else split
        for output, item in zip(outputs, splits, strict=True):
            if output is not None and item is not None:
                self._splits[output] = item
        return splits

    def _local_info(self, name: str | None, split: Split | None) -> ValueInfo:
        """Return shape and dtype of this rank's part of an output."""
        if name is None or split is None:
            return ValueInfo((), torch.float32) if name is None else self.values[name]
        return ValueInfo(split.local_shape(self.shape(name), self.rank), self.values[name].dtype)

    # -- moving values

    def part(self, name: str, split: Split) -> str:
        """Return the name of a value in the layout ``split``, redistributed if necessary.

        Raises:
            RequestError: the layout has other pixels, or has them in other dims.
        """
        current = self.splits[name]
        if (current is split or current == split) and name != self.program.image:
            return name
        if (current.dims, current.pixels) != (split.dims, split.pixels):
            raise RequestError(
                f"a map of {current.layout.map.shape} pixels in dims {current.dims} is combined with one of "
                f"{split.layout.map.shape} pixels in dims {split.dims}; what works: maps of equal size in the same dims"
            )
        return self.moved(name, split.held, split)

    def moved(self, name: str, need: Boxes, split: Split | None = None, fill: float = 0.0) -> str:
        """Return the name of a value with the box of map ``name`` that each rank needs, redistributed if necessary.

        Args:
            name: a split value.
            need: the box of each rank; may extend beyond the map.
            split: how the result is split, to be recorded if other rules may use it; None: not recorded.
            fill: value outside the map.
        """
        current = self.splits[name]
        if name == self.program.image:
            return self._read(name, need[self.rank], split, fill)
        if need == current.held:
            return name
        if not current.has_own_dims:
            return self._moved_folded(name, need, split, fill)
        source = self._covering(name, need)
        if source is not None:
            return self._cut(source, need, split, fill)
        name = self.owned(name)
        result = self.fresh(name)
        transfer = plan_transfer(current.layout.parts, need, current.layout.map, self.rank)
        self.communicate(Redistribute(transfer, current.dims, fill), (name,), (result,), "halo", split)
        return result

    def _moved_folded(self, name: str, need: Boxes, split: Split | None, fill: float) -> str:
        """Redistribute a value whose height and width share a dim: separate the dims, redistribute, reshape back."""
        current = self.splits[name]
        shape = replace(current, boxes=need).local_shape(self.shape(name), self.rank)
        moved, result = self.moved(self.opened(name), need, fill=fill), self.fresh(name)
        self.compute(lambda tensor: tensor.reshape(shape), (moved,), (result,), split)
        return result

    def opened(self, name: str) -> str:
        """Return the name of a value with the pixels of ``name``, and height and width as separate dims."""
        folded = self.splits[name]
        if folded.has_own_dims:
            return name
        shape, dims = folded.opened(self.shape(name))
        split, result = Split(folded.layout, dims), self.fresh(name, shape)
        local = folded.opened_here(self.shape(name), self.rank)
        self.compute(lambda tensor: tensor.reshape(local), (name,), (result,), split)
        return result

    def _read(self, name: str, need: Box, split: Split | None, fill: float) -> str:
        """Return the name of a box of the image, which is read without communication."""
        result = self.fresh(name)
        self._lay_out((result,), split)
        self._steps.append(_ImageRead(result, need, fill))
        return result

    def _covering(self, name: str, need: Boxes) -> str | None:
        """Return ``name``, or the value that a shared exchange makes of it, if it includes ``need``; else None."""
        current = self.splits[name]
        if current.boxes is not None and current.boxes.cover(need, current.layout.map):
            return name
        shared = self.runs.shared.get(name)
        if shared is None or not shared.cover(need, current.layout.map):
            return None
        if name not in self._shared:
            transfer = plan_transfer(current.layout.parts, shared, current.layout.map, self.rank)
            source, wide = self.owned(name), self.fresh(name)
            split = Split(current.layout, current.dims, shared)
            self.communicate(Redistribute(transfer, current.dims), (source,), (wide,), "halo", split)
            self._shared[name] = wide
        return self._shared[name]

    def owned(self, name: str) -> str:
        """Return the name of the owned parts of a value, without margins."""
        split = self.splits[name]
        return name if split.boxes is None else self._cut(name, split.layout.parts, split.owned, 0.0)

    def _cut(self, name: str, need: Boxes, split: Split | None, fill: float) -> str:
        """Return the name of a value with the needed box of each rank, cut out of its tensor or padded, not sent."""
        key = (name, need, fill)
        if key not in self._cuts:
            current = self.splits[name]
            self._cuts[key] = result = self.fresh(name)
            local = cut(current.held[self.rank], need[self.rank], current.layout.map, current.dims, fill)
            self.compute(local, (name,), (result,))
        self._lay_out((self._cuts[key],), split)
        return self._cuts[key]

    def whole(self, name: str) -> str:
        """Return the name of the whole value on every rank; gather it if it is split."""
        split = self.splits.get(name)
        if split is None:
            return name
        result = self.moved(name, Boxes.same(split.layout.map, split.layout.parts.grid))
        if result == name:  # a single rank has the whole map
            result = self.fresh(name)
            self.compute(_itself, (name,), (result,))
        return result

    def gather(self, op: Operator, name: str, problem: str = "cannot be computed part by part") -> str:
        """Gather a value that an operator needs whole, if it is small enough; return the name of the whole value.

        Raises:
            GatherError: it is larger than ``gather_bytes``.
        """
        if name not in self.splits:
            return name
        info, size = self.values[name], self.nbytes(name)
        if size > self.gather_bytes and self.grid != (1, 1):
            self.refuse(
                op,
                f"{problem}; every rank would gather {info.shape}, {size} bytes",
                f"a plan with gather_bytes={size} or more (now {self.gather_bytes}), or a grid of one rank",
                GatherError,
            )
        where = f" in {op.module}" if op.module else ""
        self._gathered.append(f"{op.text}{where}: {info.shape}, {size} bytes on every rank")
        return self.whole(name)

    def note_draws(self, op: Operator) -> None:
        """Note an operator that draws from torch's generator, which recomputation would not reproduce."""
        self._drawn.append(op)

    # -- the program

    def mark(self) -> Mark:
        """Return the current state, for ``rewind``."""
        return Mark(len(self._steps), len(self._made), len(self._gathered), len(self._drawn), len(self._fusible))

    def rewind(self, mark: Mark) -> None:
        """Discard everything emitted since ``mark``."""
        gone = set(self._made[mark.made :])
        for step in self._steps[mark.steps :]:
            gone.update((step.name,) if isinstance(step, _ImageRead) else (o for o in step.outputs if o is not None))
        del self._steps[mark.steps :], self._made[mark.made :], self._gathered[mark.gathered :]
        del self._drawn[mark.drawn :], self._fusible[mark.fusible :]
        for name in gone:
            self._splits.pop(name, None)
        self._shared = {name: wide for name, wide in self._shared.items() if wide not in gone}
        self._cuts = {key: name for key, name in self._cuts.items() if name not in gone}

    def finish(self, outputs: tuple[Any, ...], exits: tuple[str, ...] = ()) -> RankProgram:
        """Return the program, with ``outputs`` as the leaves of the output and ``exits`` for other stages."""
        instructions, read_box = self._read_image()
        record = (self._splits, outputs, self.program, self._values, exits)
        notes = frozenset(self._fusible), tuple(self._gathered), tuple(self._drawn)
        return RankProgram(instructions, read_box, *record, *notes, ahead=frozenset(self.ahead))

    def _read_image(self) -> tuple[tuple[Instruction, ...], Box]:
        """Replace the placeholders by copies out of one box of the image; return (instructions, this box)."""
        image = self.program.image
        map_box = self.splits[image].layout.map
        reads = [step.need.intersect(map_box) for step in self._steps if isinstance(step, _ImageRead)]
        read_box = hull(box for box in reads if not box.empty)
        instructions: list[Instruction] = []
        for step in self._steps:
            if isinstance(step, _ImageRead):
                transfer = Transfer(read_box, step.need, map_box, (), (), kept=read_box.intersect(step.need))
                instructions.append(LocalCall(Redistribute(transfer, fill=step.fill).placed, (image,), (step.name,)))
            else:
                instructions.append(step)
        return tuple(instructions), read_box


def _itself(tensor: Any) -> Any:
    return torch.ops.aten.alias.default(tensor)  # unlike a view, it keeps the strides of a batch of one
