"""Window operators that compute while their halo is on the way, instead of an exchange and then a local call."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyfi_core.capture.program import Operator
from hyfi_core.ops.avg_pool import AvgPool
from hyfi_core.ops.base import Collective
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.max_pool import MaxPool, WholeMaxPool
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.plan.box import Box
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.plan.window import Window
from hyfi_core.plan.window_calls import own_call
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.window_arguments import arguments


def overlapped_convolution(
    builder: Builder, op: Operator, window: Window, split: Split, need: Sequence[Box], native: tuple[int, int]
) -> bool:
    """Emit a convolution that overlaps its exchange; whether it did.

    It does not where nothing is exchanged (a rank takes from the image what it needs, or already holds it), nor in a
    fused run, whose exchange is another's.

    Args:
        builder: of the rank's program.
        op: the convolution.
        window: its window.
        split: how its output is laid out.
        need: what each rank needs of the input.
        native: (y, x) padding that the need leaves to the native call.
    """
    x, weight, bias, *_, groups = arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    halo = _own_halo(builder, x.name, split, need)
    if halo is None:
        return False
    collective = Convolution(halo, window, split.layout.parts[builder.rank], native, groups)
    _emit(builder, collective, (x.name, weight.name, None if bias is None else bias.name), op, split)
    return True


def overlapped_max_pool(
    builder: Builder, op: Operator, window: Window, split: Split, need: Sequence[Box], native: tuple[int, int]
) -> bool:
    """Emit a maximum pool that overlaps its exchange; whether it did. As for convolutions."""
    name = op.args[0].name
    halo = _own_halo(builder, name, split, need, -math.inf)
    if halo is None:
        return False
    _emit(builder, MaxPool(halo, window, split.layout.parts[builder.rank], native), (name,), op, split)
    return True


def overlapped_avg_pool(
    builder: Builder,
    op: Operator,
    window: Window,
    split: Split,
    need: Sequence[Box],
    include_pad: bool,
    divisor: int | None,
) -> bool:
    """Emit a mean pool that overlaps its exchange; whether it did. As for convolutions; all padding is in the need."""
    name = op.args[0].name
    halo = _own_halo(builder, name, split, need)
    if halo is None:
        return False
    output = split.layout.parts[builder.rank]
    pool = AvgPool(halo, window, output, (0, 0), include_pad=include_pad, divisor=divisor)
    _emit(builder, pool, (name,), op, split)
    return True


def max_pool_alone(builder: Builder, op: Operator, window: Window, split: Split) -> bool:
    """Emit the same operator without an exchange where one rank owns the whole map; whether it did.

    It writes the cotangent over the map where it can, which autograd's does not.
    """
    name = op.args[0].name
    if builder.grid != (1, 1) or any(op.outputs[1:]):
        return False
    have = builder.splits[name].layout.map
    if own_call(window, have, split.layout.map) is None:  # windows that hang over the end, for ceil_mode
        return False
    builder.custom(WholeMaxPool(window), (builder.part(name, builder.splits[name]),), op.outputs, split)
    return True


def _own_halo(builder: Builder, name: str, split: Split, need: Sequence[Box], fill: float = 0.0) -> Redistribute | None:
    """Return the exchange of a window operator; None where it has none, or none of its own."""
    have = builder.splits[name]
    fused = have.boxes is not None or split.boxes is not None or name in builder.runs.shared
    if name == builder.program.image or fused or tuple(need) == have.layout.parts:
        return None
    return Redistribute(plan_transfer(have.layout.parts, need, have.layout.map, builder.rank), have.dims, fill)


def _emit(builder: Builder, collective: Collective, inputs: tuple[str | None, ...], op: Operator, split: Split) -> None:
    builder.communicate(collective, inputs, op.outputs, "halo", split)
