"""Products whose weights get their gradients later, in a schedule that divides backwards.

    conv ─ norm ─ relu ─ linear          one segment, whose backward is autograd's: all gradients at once
     ▲                      ▲
    apart ─ norm ─ relu ─ apart          gradients of maps in I; in W those of the weights of convolution and linear

Convolutions with a halo exchange have two parts anyway (``ops.base.SplitBackward``). Other weights, such as those of
norms and separate biases, get their gradients in I: these are sums over the map, cheaper than keeping what they need.
A factor that is computed from weights (weight norm, LoRA) gets its gradient in I, too: backward continues from it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hyfi_core.capture.program import Operator
from hyfi_core.ops.product import LocalProduct
from hyfi_core.rules.instructions import CustomCall, Instruction, LocalCall, RankProgram
from hyfi_core.rules.table import facts_of


def weights_apart(ranked: RankProgram, trained: Collection[str]) -> RankProgram:
    """Return the program with local products as operators of their own, where a trained parameter is a factor.

    Args:
        ranked: the program of one rank, before calls are joined.
        trained: values of the trained parameters.
    """
    makers = {name: op for op in ranked.program.operators for name in op.outputs if name is not None}
    return replace(ranked, instructions=tuple(_apart(each, makers, trained, ranked) for each in ranked.instructions))


def _apart(
    instruction: Instruction, makers: dict[str, Operator], trained: Collection[str], ranked: RankProgram
) -> Instruction:
    """Return a product with trained weights as an operator whose backward has two parts; others unchanged."""
    if not isinstance(instruction, LocalCall) or instruction.empty is not None or len(instruction.outputs) != 1:
        return instruction
    output, parameters = instruction.outputs[0], ranked.program.parameters
    # A rule names its own values "captured~number".
    op = instruction.source or (makers.get(output.split("~")[0]) if output is not None else None)
    # A bias has one dim.
    factors = [name for name in instruction.inputs if name in trained and len(ranked.values[name].shape) > 1]
    if op is None or not facts_of(op).product or not factors:  # a bias alone is no reason to keep anything
        return instruction
    is_parameter = tuple(name in parameters for name in instruction.inputs)
    if all(is_parameter):  # without a map, nothing comes first
        return instruction
    facts = facts_of(op)
    operator = LocalProduct(
        function=instruction.function,
        are_parameters=is_parameter,
        own_cotangents=facts.gradient == "new",  # gradients in new memory may be overwritten in turn
        fresh=facts.fresh,
    )
    return CustomCall(operator, instruction.inputs, instruction.outputs)
