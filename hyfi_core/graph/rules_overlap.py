"""Window operators that compute while their halo is on the way, instead of an exchange and then a local call."""

from __future__ import annotations

from collections.abc import Sequence

from hyfi_core.graph.instructions import Split
from hyfi_core.graph.lowering import Lowering
from hyfi_core.graph.program import Operator
from hyfi_core.graph.windows import arguments
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.box import Box
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.plan.window import Window


def overlapped_convolution(
    lowering: Lowering, op: Operator, window: Window, split: Split, need: Sequence[Box], native: tuple[int, int]
) -> bool:
    """Emit a convolution that overlaps its exchange; whether it did.

    It does not where nothing is exchanged (a rank takes from the image what it needs, or already holds it), nor in a
    fused run, whose exchange is another's.

    Args:
        lowering: the program under way.
        op: the convolution.
        window: its window.
        split: how its output is laid out.
        need: what each rank needs of the input.
        native: (y, x) padding that the need leaves to the native call.
    """
    x, weight, bias, *_, groups = arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    have = lowering.splits[x.name]
    fused = have.boxes is not None or split.boxes is not None or x.name in lowering.runs.shared
    output = op.outputs[0]
    if x.name == lowering.program.image or fused or tuple(need) == have.layout.parts or output is None:
        return False
    transfer = plan_transfer(have.layout.parts, need, have.layout.map, lowering.rank)
    part = split.layout.parts[lowering.rank]
    collective = Convolution(Redistribute(transfer, have.dims), window, part, native, groups)
    lowering.splits[output] = split
    lowering.communicate(collective, (x.name, weight.name, None if bias is None else bias.name), op.outputs, "halo")
    return True
