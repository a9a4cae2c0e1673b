"""Emission of window operators that compute during their halo exchange; see ``ops.convolution``, ``ops.bands``."""

from __future__ import annotations

from hyfi_core.capture.program import Operator
from hyfi_core.ops.avg_pool import AvgPool
from hyfi_core.ops.convolution import Convolution
from hyfi_core.ops.max_pool import MaxPool, WholeMaxPool
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.ops.reduce import least
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.transfer import plan_transfer
from hyfi_core.plan.window import Window
from hyfi_core.plan.window_calls import own_call
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import arguments
from hyfi_core.rules.instructions import Split


def try_overlapped_convolution(
    builder: Builder, op: Operator, window: Window, split: Split, need: Boxes, native_padding: tuple[int, int]
) -> bool:
    """Emit a convolution that overlaps its own halo exchange; return False if it has none.

    It has none if ranks already have the pixels that they need, if they read these from the image, or in a fused run,
    where several operators share an exchange.

    Args:
        builder: builder of the rank's program.
        op: the convolution.
        window: its window.
        split: layout of its output.
        need: the box of the input that each rank needs.
        native_padding: (y, x) padding that is not in ``need``: the native call pads.
    """
    x, weight, bias, *_, groups = arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    halo = _own_halo(builder, x.name, split, need)
    if halo is None:
        return False
    collective = Convolution(halo, window, split.layout.parts[builder.rank], native_padding, groups)
    inputs = (x.name, weight.name, None if bias is None else bias.name)
    builder.communicate(collective, inputs, op.outputs, "halo", split)
    return True


def try_overlapped_max_pool(
    builder: Builder, op: Operator, window: Window, split: Split, need: Boxes, native_padding: tuple[int, int]
) -> bool:
    """Emit a max pool that overlaps its halo exchange; see ``try_overlapped_convolution``."""
    name = op.args[0].name
    halo = _own_halo(builder, name, split, need, least(builder.values[name].dtype))
    if halo is None:
        return False
    pool = MaxPool(halo, window, split.layout.parts[builder.rank], native_padding)
    builder.communicate(pool, (name,), op.outputs, "halo", split)
    return True


def try_overlapped_avg_pool(
    builder: Builder,
    op: Operator,
    window: Window,
    split: Split,
    need: Boxes,
    include_pad: bool,
    divisor: int | None,
) -> bool:
    """Emit an average pool that overlaps its halo exchange; see ``try_overlapped_convolution``.

    All padding is in ``need``.
    """
    name = op.args[0].name
    halo = _own_halo(builder, name, split, need)
    if halo is None:
        return False
    output = split.layout.parts[builder.rank]
    pool = AvgPool(halo, window, output, (0, 0), include_pad=include_pad, divisor=divisor)
    builder.communicate(pool, (name,), op.outputs, "halo", split)
    return True


def try_max_pool_alone(builder: Builder, op: Operator, window: Window, split: Split) -> bool:
    """Emit a max pool on a grid of one rank; return False if there are more ranks, or the pool returns indices.

    Unlike autograd's, its backward can overwrite the map with the cotangent.
    """
    name = op.args[0].name
    # ``WholeMaxPool`` returns no indices.
    if builder.grid != (1, 1) or any(op.outputs[1:]):
        return False
    have = builder.splits[name].layout.map
    if own_call(window, have, split.layout.map) is None:  # with ceil_mode, windows beyond the padding
        return False
    builder.custom(WholeMaxPool(window), (builder.part(name, builder.splits[name]),), op.outputs, split)
    return True


def _own_halo(builder: Builder, name: str, split: Split, need: Boxes, fill: float = 0.0) -> Redistribute | None:
    """Return the halo exchange of a window operator; None if it has none of its own."""
    have = builder.splits[name]
    # In a fused run, an earlier exchange that several operators share has brought the margins.
    fused = have.boxes is not None or split.boxes is not None or name in builder.runs.shared
    if name == builder.program.image or fused or need == have.layout.parts:
        return None
    return Redistribute(plan_transfer(have.layout.parts, need, have.layout.map, builder.rank), have.dims, fill)
