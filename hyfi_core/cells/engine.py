"""Cell by cell: one process evaluates an image whose activations do not fit it, exactly.

The image is cut into a grid of cells, and each cell is a rank of that grid: the same programs, run in turn by one
thread. A cell reads its box of the image, with a margin, and goes on until it needs of others what they have not come
to yet; it has dropped everything else by then. So the peak is one cell's, and of all cells what fused runs end with.

    image    ┌────┬────┐   cell 0   read ─ conv ─ … ─ a small map ┐          ┌ … ─ sums ┐
             │ 0  │ 1  │   cell 1   read ─ conv ─ … ─ a small map ┤ exchange ├ … ─ sums ┤ add up ─ answer
             ├────┼────┤   cell 2   read ─ conv ─ … ─ a small map ┤          ├ … ─ sums ┤
             │ 2  │ 3  │   cell 3   read ─ conv ─ … ─ a small map ┘          └ … ─ sums ┘
             └────┴────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program, Ref
from hyfi_core.cells.fused_memory import Price, runs_for_cells
from hyfi_core.cells.fused_place import CELL_RULES
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.cooperative import CooperativeCommunicator, CooperativeGroup, WouldBlock
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from hyfi_core.lowering.segments import Tape, build_tape
from hyfi_core.ops.bands import Banded
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.redistribute import PendingStrips, Redistribute
from hyfi_core.plan.box import Box
from hyfi_core.rules.instructions import CollectiveCall, Instruction, RankProgram
from hyfi_core.runtime.attribution import Explanation, attribute_head, last_map, split_tape
from hyfi_core.runtime.backward import Values
from hyfi_core.runtime.batch_reader import Images, InputPart, Shape, batch_shape, read_part
from hyfi_core.runtime.bindings import Bindings, RandomKey
from hyfi_core.runtime.compiled import HostedStage
from hyfi_core.runtime.executor import Executor, evaluating


@dataclass(frozen=True)
class CellProgram:
    """A model in evaluation mode for one shape of the batch, cell by cell.

    Attributes:
        program: the captured model.
        cells: what each cell does; they share the weights.
        price: peak memory of all maps and work of all cells, as modelled.
    """

    program: Program
    cells: tuple[HostedStage, ...]
    price: Price

    @classmethod
    def of(cls, model: nn.Module, shape: Shape, dtype: torch.dtype, grid: tuple[int, int]) -> CellProgram:
        """Capture a model and lower it for every cell.

        Raises:
            RequestError: the model cannot be captured, or has an operator that cannot be computed by parts.
        """
        program = pool_before_relu(capture(model, shape, dtype), ())
        runs, price = runs_for_cells(program, grid)

        def lowered(position: int) -> RankProgram:
            ranked = lower(program, Target(grid, position, CELL_RULES), fused_halo=runs)
            return replace(ranked, instructions=tuple(map(_looking, ranked.instructions)))

        return cls(program, tuple(_hosted(lowered(at), at) for at in range(grid[0] * grid[1])), price)

    @cached_property
    def head(self) -> tuple[str, list[Tape], HostedStage, Tape]:
        """(last map, each cell's tape up to it, the model in one piece, its tape from there, with gradients).

        Raises:
            RequestError: the answer is not reduced from a map.
        """
        bodies = [split_tape(cell.ranked)[1] for cell in self.cells]
        name, _ = last_map(self.cells[0].ranked)
        stage = _hosted(lower(self.program, Target((1, 1), 0)), 0)
        start = next(at for at, done in enumerate(stage.ranked.instructions, 1) if name in done.outputs)
        return name, bodies, stage, build_tape(stage.ranked, (name,), start=start)


class CellEngine:
    """Evaluates a model cell by cell in one process: the answers of one process, to rounding, in a cell's memory.

    Weights are the module's own: what changes them between two calls changes the answers.

    Args:
        model: any ``nn.Module`` that takes one image tensor; untouched.
        shape: of a batch, ``(B, C, H, W)``; other batches may be given, and each shape is captured once.
        cells: rows and columns.
        autocast: computes in this type where autocast would (``torch.bfloat16``).

    Raises:
        RequestError: shape or cells make no sense, or the model cannot be evaluated so.
    """

    def __init__(
        self, model: nn.Module, shape: Shape, cells: tuple[int, int], *, autocast: torch.dtype | None = None
    ) -> None:
        if len(shape) != 4 or any(side < 1 for side in shape):
            raise RequestError(f"shape is {shape}; give (B, C, H, W)")
        if len(cells) != 2 or any(side < 1 for side in cells):
            raise RequestError(f"cells is {cells}; give rows and columns, whole numbers from 1")
        self._model, self._shape, self._grid, self._autocast = model, shape, cells, autocast
        self._device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._bindings = Bindings(model, RandomKey(0))
        self._known: dict[Shape, CellProgram] = {}
        self.program(shape)

    def program(self, shape: Shape) -> CellProgram:
        """Return what is run for batches of a shape, with its price."""
        if shape not in self._known:
            with self._evaluating():
                self._known[shape] = CellProgram.of(self._model, shape, self._dtype, self._grid)
        return self._known[shape]

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over weights and buffers."""
        self._model.load_state_dict(state)

    def predict(self, images: Images) -> Any:
        """Return the model's answer for a batch.

        Args:
            images: as ``Engine.predict`` takes them. Each cell reads its own box, when its turn comes; only a batch
                given as a tensor is ever there as a whole.
        """
        with self._evaluating(), torch.no_grad():
            made = self.program(batch_shape(images, self._shape))
            outputs = made.cells[0].ranked.outputs
            names = [item.name for item in outputs if isinstance(item, Ref)]
            answer = self._run(made, [cell.tape for cell in made.cells], images, lambda at: names if at == 0 else [])[0]
            return made.program.unflatten([answer[o.name] if isinstance(o, Ref) else o for o in outputs])

    def attribute(self, images: Images) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits ``(B, K)``, contributions ``(B, K, h, w)``) float32, the same on every rank; see `explain`.

        Raises:
            RequestError: as `explain`.
        """
        return self.explain(images)[:2]

    def explain(self, images: Images) -> Explanation:
        """Return the logits and where they come from; see ``Engine.explain``.

        The last map is put together, and what follows it is computed in one piece: twice its memory, and its gradient.

        Raises:
            RequestError: the model's answer is not one tensor of logits reduced from a map.
        """
        with self._evaluating():
            made = self.program(batch_shape(images, self._shape))
            name, bodies, stage, head = made.head
            with torch.no_grad():
                parts = self._run(made, bodies, images, lambda at: [name])
                last = _put_together(made.cells[0].ranked, name, [part.pop(name) for part in parts])
            values = {**self._bindings.begin(stage, None), name: last}
            return attribute_head(stage.ranked, name, head, values, CountedCommunicator(AloneCommunicator()))

    def _run(
        self, made: CellProgram, tapes: Sequence[Tape], images: Images, keep: Callable[[int], Sequence[str]]
    ) -> list[Values]:
        """Run all cells and return what each keeps."""
        batch = batch_shape(images, self._shape)

        def begin(stage: HostedStage) -> Values:
            return self._bindings.begin(stage, self._read(images, stage.ranked.read_box, batch))

        group = CooperativeGroup(len(made.cells))
        cells = [
            _Cell(stage, tape, CooperativeCommunicator(group, at), begin, keep(at))
            for at, (stage, tape) in enumerate(zip(made.cells, tapes, strict=True))
        ]
        _run_cooperatively(group, cells)
        return [cell.values for cell in cells]

    def _read(self, images: Images, box: Box, batch: Shape) -> torch.Tensor:
        """Return a box of the whole batch; what is empty is not asked for."""
        if box.empty:
            return torch.empty((*batch[:2], 0, 0), dtype=self._dtype, device=self._device)
        return read_part(images, InputPart(box, 0, batch[0]), batch[1]).to(device=self._device, dtype=self._dtype)

    def _evaluating(self) -> Any:
        return evaluating(self._model, self._device, self._autocast)


@dataclass
class _Cell:
    """A cell on its way.

    Attributes:
        stage: what it does.
        tape: as steps.
        comm: the other cells.
        begin: makes the values that are there before the first step.
        keep: names of the values that are wanted of it in the end.
        values: what is there now; at the end what is kept.
        at: steps done.
    """

    stage: HostedStage
    tape: Tape
    comm: CooperativeCommunicator
    begin: Callable[[HostedStage], Values]
    keep: Sequence[str]
    values: Values = field(default_factory=dict)
    at: int = 0

    def go_on(self) -> bool:
        """Take steps until others must take theirs; whether this cell is done."""
        if self.at == 0 and not self.values:
            self.values = self.begin(self.stage)
        executor = Executor(self.tape, self.comm)
        while self.at < len(self.tape.steps):
            self.comm.begin()
            try:
                executor.do(self.tape.steps[self.at], self.values)
            except WouldBlock:
                return False
            self.comm.end()
            self.at += 1
        self.values = {name: self.values[name] for name in self.keep}
        return True


def _run_cooperatively(group: CooperativeGroup, cells: Sequence[_Cell]) -> None:
    """Let each cell go on as far as it can, one after the other, until all are done.

    Raises:
        RuntimeError: they wait for each other crosswise: the programs of the cells are not those of one model.
    """
    open_cells = list(cells)
    while open_cells:
        before = (group.happened, sum(cell.at for cell in cells))
        open_cells = [cell for cell in open_cells if not cell.go_on()]
        if open_cells and before == (group.happened, sum(cell.at for cell in cells)):
            raise RuntimeError(f"cells {[cell.stage.position for cell in open_cells]} wait for each other")


class _Look(Redistribute):
    """A redistribution between cells: each looks at the others' parts, and nothing is copied on the way."""

    def start(self, comm: Communicator, own: torch.Tensor) -> PendingStrips:
        """Show the others what they need of ``own``, and look at what this cell needs of theirs."""
        assert isinstance(comm, CooperativeCommunicator)
        transfer = self.transfer
        shown = [Message(strip.peer, self._view(own, strip.box, transfer.have)) for strip in transfer.sends]
        return PendingStrips(None, tuple(comm.swap(shown, [(strip.peer, 0) for strip in transfer.receives])))


def _looking(instruction: Instruction) -> Instruction:
    """Return the instruction with cells that look where ranks would send."""
    if not isinstance(instruction, CollectiveCall):
        return instruction
    operator = instruction.operator
    if isinstance(operator, Redistribute):
        return replace(instruction, operator=_look(operator))
    if isinstance(operator, (Convolution, Banded)):
        return replace(instruction, operator=replace(operator, halo=_look(operator.halo)))
    return instruction


def _look(halo: Redistribute) -> _Look:
    return _Look(halo.transfer, halo.dims, halo.fill)


def _hosted(ranked: RankProgram, position: int) -> HostedStage:
    return HostedStage(ranked, build_tape(ranked, ()), position, reads_image=True)


def _put_together(ranked: RankProgram, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the whole of a map; each cell's part is let go of when it is in its place."""
    split, info = ranked.splits[name], ranked.values[name]
    like = parts[0]
    order = torch.channels_last if like.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    whole = torch.empty(info.shape, dtype=like.dtype, device=like.device, memory_format=order)
    for box in reversed(split.layout.parts):
        part = parts.pop()
        if not box.empty:
            rows, columns = box.slices()
            whole[:, :, rows, columns] = part
    return whole
