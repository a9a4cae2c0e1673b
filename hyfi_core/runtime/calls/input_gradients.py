"""Gradients of each output with respect to the image, as each rank and each cell has its part of it.

::

    image ── forward with a tape ──▶ outputs
      ◀── one backward for each output ──

Parts overlap where several ranks read the same pixels as halo: the gradient of such a pixel is the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyfi_core.cells.paged_steps import AllStays, StepMemory
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.waits import Waits, within
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling.segment_compiler import uncompiled
from hyfi_core.lowering.segments import Tape, build_tape
from hyfi_core.plan.box import Box
from hyfi_core.runtime.backward import LocalValues
from hyfi_core.runtime.calls.attribution import output_logits
from hyfi_core.runtime.executor import Executor
from hyfi_core.runtime.lowered_model import LoweredModel


@dataclass(frozen=True, eq=False)
class InputGradient:
    """The gradient of one output, summed over the samples of a micro-batch, in one part of the image.

    Attributes:
        output: Index of the output.
        first: The first sample of the micro-batch.
        box: The part, in pixels of the image.
        pixels: ``(b, 3, h, w)`` of the part, in memory of the engine.
        values: ``(b, 3, h, w)``: what this part contributes to the gradient of its pixels; in memory of the engine.
    """

    output: int
    first: int
    box: Box
    pixels: torch.Tensor
    values: torch.Tensor


UseGradient = Callable[[InputGradient], None]
"""Takes one gradient; tensors are valid during the call only."""


def differentiate(
    lowered: LoweredModel,
    values: LocalValues,
    stage: CountedCommunicator,
    first: int,
    use: UseGradient,
    memory_of: Callable[[Tape], StepMemory] = lambda tape: AllStays(),
) -> Waits[torch.Tensor]:
    """Pass the gradient of each output in this part to ``use``; return the outputs of a micro-batch, ``(b, K)``.

    Args:
        lowered: the model in evaluation mode.
        values: values before the first instruction, the image among them; changed.
        stage: the ranks of the stage.
        first: first sample of the micro-batch.
        use: takes the gradients, output by output.
        memory_of: returns the callbacks around each step of a tape.

    Raises:
        RequestError: the output is not one tensor of logits, or branches are divided.
    """
    ranked = lowered.only.ranked
    if ranked.of_all_planes:
        raise RequestError("gradients of the image need a plan whose planes have the whole model; use plan.branches=1")
    image = ranked.program.image
    pixels = values[image]
    tape = build_tape(ranked, (image,))
    memory = memory_of(tape)
    executor = Executor(tape, stage, memory=memory)
    # The backward of compiled code runs only once; here it runs for each output.
    records = yield from within(uncompiled, executor.forward(values, record=True))
    logits, output = output_logits(ranked, values)
    memory.stay(logits)
    for index in range(logits.shape[1]):
        seed = torch.zeros_like(logits)
        seed[:, index] = float(stage.rank == 0)  # a replicated output: its cotangent is a sum over ranks
        # The last backward frees the records as it goes.
        last = index == logits.shape[1] - 1
        gradient = (yield from executor.backward(records, {output: seed}, parameters={}, keep=not last)).get(image)
        memory.need([pixels, gradient])
        of_pixels = torch.zeros_like(pixels) if gradient is None else gradient
        use(InputGradient(index, first, ranked.read_box, pixels, of_pixels))
    return logits.float()
