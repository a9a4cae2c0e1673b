"""Outputs of a model: sent from the last stage to other ranks, and joined over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from hyfi_core.capture.program import Program, Ref
from hyfi_core.errors import RequestError
from hyfi_core.runtime.lowered_model import LoweredModel


def described(leaves: list[Any]) -> list[Any]:
    """Return each leaf of an output for receivers: a tensor as ``[shape, name of its dtype]``, others as they are."""
    return [
        [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def undescribed(descriptions: list[Any], leaves: list[Any] | None, device: torch.device) -> list[Any]:
    """Return the leaves, contiguous; on a rank without them, empty tensors in which to receive them.

    Args:
        descriptions: result of ``described``, for all leaves.
        leaves: None on ranks that receive.
        device: device of the empty tensors.
    """
    if leaves is not None:
        return [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    received = []
    for item in descriptions:
        if isinstance(item, list):
            shape, dtype_name = item
            item = torch.empty(shape, dtype=getattr(torch, dtype_name), device=device)
        received.append(item)
    return received


def output_of_batch(lowered: LoweredModel, outputs: Sequence[list[Any]]) -> Any:
    """Return the output for a whole batch, from the leaves of its micro-batches' outputs, in order.

    Tensors are concatenated, except those that are the same for any image, such as prototypes.

    Raises:
        RequestError: the output has a number that is computed from all images together.
    """
    if len(outputs) == 1:
        return lowered.pick(outputs[0])
    from_image = _values_from_image(lowered.program)
    leaves: list[Any] = []
    numbers: list[torch.Tensor] = []
    for leaf, parts in zip(lowered.outputs, zip(*outputs, strict=True), strict=True):
        if not isinstance(leaf, Ref) or leaf.name not in from_image:
            leaves.append(parts[0])
        elif parts[0].dim():
            leaves.append(torch.cat(parts))
        else:
            leaves.append(parts[0])
            numbers.append(parts[0])
    output = lowered.pick(leaves)
    # Checked last, because the user's function may leave such numbers out.
    if any(leaf is number for leaf in _pytree.tree_leaves(output) for number in numbers):
        raise RequestError(
            f"the model's output has a number for all images of a micro-batch, and there are {len(outputs)} micro-"
            f"batches, whose numbers are not that of the whole batch; select the logits with output=, or use "
            f"plan.microbatches=1"
        )
    return output


def _values_from_image(program: Program) -> set[str]:
    """Return the names of the values that are computed from the image."""
    names = {program.image}
    for op in program.operators:
        if names.intersection(op.inputs):
            names.update(name for name in op.outputs if name is not None)
    return names
