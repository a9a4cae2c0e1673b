"""Window operators that compute while their halo is on the way, instead of an exchange and then a local call."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyfi_core.capture.program import Operator
from hyfi_core.lowering.lower import Lowering
from hyfi_core.ops.avg_pool import AvgPool
from hyfi_core.ops.base import Collective
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.max_pool import MaxPool
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.box import Box
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.plan.window import Window
from hyfi_core.rules.instructions import NO_MESSAGES, Split
from hyfi_core.rules.window_arguments import arguments


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
    halo = _own_halo(lowering, x.name, split, need)
    if halo is None:
        return False
    collective = Convolution(halo, window, split.layout.parts[lowering.rank], native, groups)
    _emit(lowering, collective, (x.name, weight.name, None if bias is None else bias.name), op, split)
    return True


def overlapped_max_pool(
    lowering: Lowering, op: Operator, window: Window, split: Split, need: Sequence[Box], native: tuple[int, int]
) -> bool:
    """Emit a maximum pool that overlaps its exchange; whether it did. As for convolutions."""
    name = op.args[0].name
    halo = _own_halo(lowering, name, split, need, -math.inf)
    if halo is None:
        return False
    _emit(lowering, MaxPool(halo, window, split.layout.parts[lowering.rank], native), (name,), op, split)
    return True


def overlapped_avg_pool(
    lowering: Lowering,
    op: Operator,
    window: Window,
    split: Split,
    need: Sequence[Box],
    include_pad: bool,
    divisor: int | None,
) -> bool:
    """Emit a mean pool that overlaps its exchange; whether it did. As for convolutions; all padding is in the need."""
    name = op.args[0].name
    halo = _own_halo(lowering, name, split, need)
    if halo is None:
        return False
    output = split.layout.parts[lowering.rank]
    pool = AvgPool(halo, window, output, (0, 0), include_pad=include_pad, divisor=divisor)
    _emit(lowering, pool, (name,), op, split)
    return True


def max_pool_alone(lowering: Lowering, op: Operator, window: Window, split: Split, native: tuple[int, int]) -> bool:
    """Emit the same operator without an exchange where one rank owns the whole map; whether it did.

    It writes the cotangent over the map where it can, which autograd's does not.
    """
    name = op.args[0].name
    have = lowering.splits[name].layout
    if lowering.grid != (1, 1) or any(op.outputs[1:]):
        return False
    idle = Redistribute(plan_transfer(have.parts, have.parts, have.map, 0), lowering.splits[name].dims, -math.inf)
    pool = MaxPool(idle, window, split.layout.parts[0], native)
    if pool.own is not None:
        _emit(lowering, pool, (lowering.part(name, lowering.splits[name]),), op, split, NO_MESSAGES)
    return pool.own is not None


def _own_halo(
    lowering: Lowering, name: str, split: Split, need: Sequence[Box], fill: float = 0.0
) -> Redistribute | None:
    """Return the exchange of a window operator; None where it has none, or none of its own."""
    have = lowering.splits[name]
    fused = have.boxes is not None or split.boxes is not None or name in lowering.runs.shared
    if name == lowering.program.image or fused or tuple(need) == have.layout.parts:
        return None
    return Redistribute(plan_transfer(have.layout.parts, need, have.layout.map, lowering.rank), have.dims, fill)


def _emit(
    lowering: Lowering,
    collective: Collective,
    inputs: tuple[str | None, ...],
    op: Operator,
    split: Split,
    kind: str = "halo",
) -> None:
    lowering.splits.update((output, split) for output in op.outputs if output is not None)
    lowering.communicate(collective, inputs, op.outputs, kind)
