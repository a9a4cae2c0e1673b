"""In-place pass: sums and activations overwrite an operand that is no longer needed.

The captured program is functional, so ``relu_`` and ``+=`` of the user's model are operators with new results. On a
CPU, allocating the pages of such a result costs more than the arithmetic.

    conv ──▶ a ──▶ norm ──▶ b ──▶ relu ──▶ c          b is norm's result, which norm does not save and only relu
                            └──── same ────┘          uses: relu writes c over it

A relu becomes an operator with its own backward, so that its cotangent can overwrite the incoming one (see
``lowering.reuse``). On a single rank, the relu of a small map stays with its neighbours in a segment: one more segment
takes longer than new memory. The backward of a max pool needs only the memory of its input, not its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch

from hyfi_core.ops.avg_pool import AvgPool
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.max_pool import MaxPool, WholeMaxPool
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.ops.product import LocalProduct
from hyfi_core.ops.relu import Relu
from hyfi_core.rules.instructions import CollectiveCall, CustomCall, Instruction, LocalCall, RankProgram
from hyfi_core.rules.table import facts_of

_POOLS = (MaxPool, WholeMaxPool)
SMALL_BYTES = 1 << 20
"""Size of a small map. ResNet-50, two images of 64 x 64 on one core, relus with a backward of their own: 102 steps and
1.15 times plain PyTorch's time; relus in segments: 5 steps and 1.06 times."""


def in_place(ranked: RankProgram, alone: bool = False) -> RankProgram:
    """Return the program with in-place calls where an operand is new memory and used only here.

    Results of the program (outputs, values for other stages, buffers) count as used; inputs of it are never
    overwritten.

    Args:
        ranked: the program of one rank.
        alone: whether there is no other rank; others may wait for gradients, which a segment completes at its end.
    """
    uses = Counter(name for instruction in ranked.instructions for name in instruction.inputs)
    # A result of the program is read outside of it, too: that counts as one more user.
    uses.update(ranked.results)
    fresh: set[str] = set()
    instructions: list[Instruction] = []
    for instruction in ranked.instructions:
        # Used once, so by this instruction: the value is not read afterwards.
        free = {name for name in instruction.inputs if name in fresh and uses[name] == 1}
        if isinstance(instruction, LocalCall) and not (alone and _is_small_relu(instruction, ranked)):
            instruction = _in_place(instruction, free)
        instructions.append(instruction)
        if _makes_fresh(instruction) and instruction.outputs[0] is not None:
            fresh.add(instruction.outputs[0])
    # Results are read after the run: no pool may write over them.
    return replace(ranked, instructions=tuple(_pools_over(instructions, fresh.difference(ranked.results))))


def _is_small_relu(call: LocalCall, ranked: RankProgram) -> bool:
    name = call.outputs[0]
    if call.source is None or call.source.text != "aten.relu.default" or name is None:
        return False
    info = ranked.values[name]
    return prod(info.shape) * info.dtype.itemsize <= SMALL_BYTES


def _makes_fresh(instruction: Instruction) -> bool:
    """Whether an instruction's first result is new memory that its backward does not read."""
    if isinstance(instruction, LocalCall):
        return instruction.source is not None and facts_of(instruction.source).fresh
    if isinstance(instruction.operator, LocalProduct):
        return instruction.operator.fresh
    return isinstance(instruction.operator, (Convolution, BatchNorm))


def _pools_over(instructions: list[Instruction], fresh: set[str]) -> Iterator[Instruction]:
    """Yield the instructions; max pools overwrite their input with its cotangent where that is possible.

    When its backward runs, the input must not be needed: its other users do not save it, or save it only for its memory
    and have already run backward.
    """
    users: dict[str, list[int]] = {}
    for index, instruction in enumerate(instructions):
        for name in dict.fromkeys(instruction.inputs):
            if name in fresh:
                users.setdefault(name, []).append(index)
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, (CustomCall, CollectiveCall)) and isinstance(instruction.operator, _POOLS):
            # When the pool runs backward, users after it have already done so, users before it have not.
            other_users = (at for at in users.get(str(instruction.inputs[0]), ()) if at != index)
            # Only values of ``fresh`` are listed: other memory is also held elsewhere.
            is_fresh = str(instruction.inputs[0]) in users
            if is_fresh and all(_saves_nothing(instructions[at], pools_save=at < index) for at in other_users):
                operator: Any = replace(instruction.operator, overwrites_map=True)
                yield replace(instruction, operator=operator)
                continue
        yield instruction


def _saves_nothing(instruction: Instruction, pools_save: bool) -> bool:
    """Whether an instruction neither changes its inputs nor saves them for backward.

    Args:
        instruction: any.
        pools_save: whether a max pool counts as saving its input: until its backward has run, it needs that memory,
            though not the values.
    """
    if isinstance(instruction, LocalCall):
        return instruction.source is not None and instruction.source.text == "aten.add.Tensor"
    return isinstance(instruction.operator, (Relu, AvgPool) if pools_save else (Relu, AvgPool, *_POOLS))


def _in_place(call: LocalCall, free: set[str]) -> Instruction:
    """Return the call, in place over one of its ``free`` operands if the operator allows it."""
    op = call.source
    if op is None or call.empty is not None:
        return call
    if op.text == "aten.relu.default":
        return CustomCall(Relu(overwrites_input=bool(free)), call.inputs, call.outputs)
    if free and op.text == "aten.add.Tensor" and len(call.inputs) == 2 and not op.kwargs:
        # Sums commute bit for bit, so that either operand may be the one that is overwritten.
        order = (0, 1) if call.inputs[0] in free else (1, 0)
        return replace(call, function=_sum_over(*order))
    return call


def _sum_over(target: int, addend: int) -> Callable[..., torch.Tensor]:
    """Return an addition that overwrites operand ``target`` with its sum with operand ``addend``, where they fit."""

    def call(*operands: Any) -> Any:
        result, added = operands[target], operands[addend]
        # Under autocast their dtypes may differ.
        fits = result.shape == added.shape and result.dtype == added.dtype
        return result.add_(added) if fits else torch.add(*operands)

    return call
