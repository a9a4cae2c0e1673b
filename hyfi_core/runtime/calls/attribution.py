"""Attribution: the contribution of each position of the last feature map to each logit.

    image ── body, no gradients ──▶ last map ── head, with a tape ──▶ logits
                                        ◀── one backward for each class ──

Activation times gradient, summed over channels. The last map is followed by a mean or a maximum over space and a linear
layer, so the contributions plus the bias sum to the logit. Vectors of tiles are such a map, too (see ``last_map``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from hyfi_core.capture.program import Program, Ref, substitute
from hyfi_core.cells.paged_steps import AllStays, StepMemory
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.waits import Waits, waited, within
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling.segment_compiler import uncompiled
from hyfi_core.lowering.joined_calls import unjoined
from hyfi_core.lowering.segments import Tape
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.layout import Layout
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.rules.instructions import RankProgram
from hyfi_core.runtime.backward import LocalValues
from hyfi_core.runtime.calls.last_map import as_map, is_feature_map, split_tape
from hyfi_core.runtime.executor import Executor
from hyfi_core.runtime.lowered_model import LoweredModel

POSITIONS_AT_ONCE = 16384
"""Positions to which the head is applied at a time; this bounds the memory of ``position_logits``."""


class Explanation(NamedTuple):
    """Logits and their contributions; float32, the same on every rank of the stage.

    Attributes:
        logits: ``(B, K)``.
        contributions: ``(B, K, h, w)``: of each position of the last map; plus the bias they sum to the logits.
        positions: ``(B, K, h, w)``: the logits of the head at each position alone, without pooling; None if the head
            needs a whole map, and for tiles.
    """

    logits: torch.Tensor
    contributions: torch.Tensor
    positions: torch.Tensor | None


class ExplainedPart(NamedTuple):
    """An explanation as one rank, or one cell of a rank, computes it.

    Attributes:
        explanation: the logits, and the maps of this part of the last map.
        layout: the parts of all ranks of the stage; with cells, those of all cells of all ranks.
        position: position of this rank, or cell, in the layout.
    """

    explanation: Explanation
    layout: Layout
    position: int

    @property
    def box(self) -> Box:
        """The part of the last map."""
        return self.layout.parts[self.position]


def attribute(
    lowered: LoweredModel,
    values: LocalValues,
    stage: CountedCommunicator,
    memory_of: Callable[[Tape], StepMemory] = lambda tape: AllStays(),
) -> Waits[ExplainedPart]:
    """Return logits and this rank's part of the maps for a batch.

    Args:
        lowered: the model in evaluation mode.
        values: values before the first instruction; changed.
        stage: the ranks of the stage.
        memory_of: returns the callbacks around each step of a tape.

    Raises:
        RequestError: the output is not one tensor of logits reduced from a map, or branches are divided.
    """
    ranked_model = lowered.only.ranked
    if ranked_model.of_all_planes:
        raise RequestError("contributions need a plan whose planes have the whole model; use plan.branches=1")
    # The last map may be hidden inside a joined call.
    ranked = replace(ranked_model, instructions=unjoined(ranked_model.instructions))
    name, body, head = split_tape(ranked)
    yield from Executor(body, stage, memory=memory_of(body)).forward(values, record=False)
    part = yield from attribute_head(ranked, name, head, values, stage, memory_of(head))
    return ExplainedPart(part, ranked.splits[name].layout, stage.rank)


def join_explanations(pieces: Sequence[ExplainedPart]) -> ExplainedPart:
    """Return the explanations of a batch's micro-batches, in order, as one."""
    positions = [piece.explanation.positions for piece in pieces if piece.explanation.positions is not None]
    explanation = Explanation(
        torch.cat([piece.explanation.logits for piece in pieces]),
        torch.cat([piece.explanation.contributions for piece in pieces]),
        torch.cat(positions) if len(positions) == len(pieces) else None,
    )
    return ExplainedPart(explanation, pieces[0].layout, pieces[0].position)


def gather_explanation(
    parts: Sequence[ExplainedPart], cells: tuple[int, int], stage: CountedCommunicator
) -> Explanation:
    """Return the explanation with whole maps, the same on every rank. Collective over the processes of the stage.

    A process first joins the parts of its cells, so that it holds each whole map once.

    Args:
        parts: the part of each cell of this process; a single part without cells.
        cells: rows and columns of cells of each process.
        stage: the processes of the stage.
    """
    layout = parts[0].layout
    of_processes = Layout(layout.rows[:: cells[0]], layout.columns[:: cells[1]])
    own = of_processes.parts[stage.rank]
    # From each process's part to the whole map on every process: gathering as a redistribution.
    transfer = plan_transfer(
        of_processes.parts, Boxes.same(layout.map, of_processes.parts.grid), layout.map, stage.rank
    )

    def joined_cells(maps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this process's part of a map from the parts of its cells."""
        if len(maps) == 1:
            return maps[0]
        joined = maps[0].new_empty((*maps[0].shape[:2], *own.shape))
        for part, values in zip(parts, maps, strict=True):
            rows, columns = part.box.relative_to(own).slices()
            joined[:, :, rows, columns] = values
        return joined

    def whole(maps: Sequence[torch.Tensor]) -> torch.Tensor:
        outputs, _ = waited(Redistribute(transfer).forward(stage, (joined_cells(maps).contiguous(),)))
        return outputs[0]

    positions = [part.explanation.positions for part in parts if part.explanation.positions is not None]
    return Explanation(
        parts[0].explanation.logits,
        whole([part.explanation.contributions for part in parts]),
        whole(positions) if len(positions) == len(parts) else None,
    )


def attribute_head(
    ranked: RankProgram,
    name: str,
    head: Tape,
    values: LocalValues,
    stage: CountedCommunicator,
    memory: StepMemory | None = None,
) -> Waits[Explanation]:
    """Return the logits, and this rank's part of the maps.

    Args:
        ranked: this rank's program.
        name: the last map.
        head: the tape from there to the output, with gradients of the map.
        values: values before it, including this rank's part of the last map; changed.
        stage: the ranks of the stage.
        memory: callbacks around each step of the head; None: everything stays in memory.

    Raises:
        RequestError: the output is not one tensor of logits.
    """
    memory = AllStays() if memory is None else memory
    activation = values[name]
    memory.need(activation)
    pools_maps = is_feature_map(ranked, name)
    positions = position_logits(ranked.program, name, activation, values) if pools_maps else None
    executor = Executor(head, stage, memory=memory)
    # One tape and a backward for each class: ``keep`` leaves its records as they are.
    records = yield from within(uncompiled, executor.forward(values, record=True))
    logits, output = output_logits(ranked, values)
    memory.stay(logits)
    maps = []
    for index in range(logits.shape[1]):
        seed = torch.zeros_like(logits)
        seed[:, index] = float(stage.rank == 0)  # a replicated output: its cotangent is a sum over ranks
        gradient = (yield from executor.backward(records, {output: seed}, {}, keep=True)).get(name)
        # They are used outside of the tape's steps, where the pager does not load them by itself.
        memory.need([activation, gradient])
        contribution = torch.zeros_like(activation) if gradient is None else activation * gradient
        maps.append(as_map(ranked, name, contribution, stage.rank).float().sum(1, keepdim=True))
    return Explanation(logits.float(), torch.cat(maps, 1), positions)


def position_logits(program: Program, name: str, part: torch.Tensor, values: LocalValues) -> torch.Tensor | None:
    """Return the logits of the head at each position of a map alone, as if it were a map of one pixel.

    For a mean or a maximum over space and a linear layer: that layer applied to each position. Memory: that of the head
    for ``POSITIONS_AT_ONCE`` positions.

    Args:
        program: the captured model, for one image.
        name: the last map.
        part: some of its positions, ``(B, C, h, w)``.
        values: the model's own tensors.

    Returns:
        ``(B, K, h, w)`` float32; None if the head needs more than one pixel.
    """
    # The head: the operators that depend on the map.
    steps, dependent = [], {name}
    for op in program.operators:
        if dependent.intersection(op.inputs):
            steps.append(op)
            dependent.update(output for output in op.outputs if output is not None)
    output = next(item.name for item in program.outputs if isinstance(item, Ref))

    def head(pixel: torch.Tensor) -> torch.Tensor:
        """Return the logits ``(K,)`` of a map of one pixel ``(C,)``."""
        computed = {**values, name: pixel[None, :, None, None]}
        for op in steps:
            kwargs = {key: substitute(value, computed) for key, value in op.kwargs.items()}
            returned = op.target(*substitute(op.args, computed), **kwargs)
            outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
            computed.update((o, out) for o, out in zip(op.outputs, outputs, strict=False) if o is not None)
        logits: torch.Tensor = computed[output].reshape(-1)
        return logits

    batch, channels, height, width = part.shape
    vectors = part.permute(0, 2, 3, 1).reshape(-1, channels)
    # A rank without positions tries a vector of zeros, so that all ranks agree on whether the head takes one pixel.
    pixels = vectors if len(vectors) else part.new_zeros((1, channels))
    try:
        with torch.no_grad():
            scores = torch.vmap(head, chunk_size=POSITIONS_AT_ONCE)(pixels)[: len(vectors)]
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError):
        return None  # the head needs a map of the captured size
    if scores.shape[1] != program.values[output].shape[-1]:
        return None
    return scores.float().reshape(batch, height, width, scores.shape[1]).permute(0, 3, 1, 2)


def output_logits(ranked: RankProgram, values: LocalValues) -> tuple[torch.Tensor, str]:
    """Return the only tensor of the output, ``(B, K)``, and its name.

    Raises:
        RequestError: the output has several tensors, or one of another number of dims.
    """
    names = [item.name for item in ranked.outputs if isinstance(item, Ref)]
    if len(names) != 1 or values[names[0]].dim() != 2:
        shapes = [tuple(values[name].shape) for name in names]
        raise RequestError(
            f"contributions need logits of shape (B, classes), but the model returns {shapes}; select the logits "
            f"with parallelize(..., output=...)"
        )
    return values[names[0]], names[0]
