"""Outputs of a model: sent from the last stage to other ranks, and joined over micro-batches."""

from __future__ import annotations

from typing import Any

import torch


def described(leaves: list[Any]) -> list[Any]:
    """Return shapes and dtypes of the leaves of an output, for receivers."""
    return [
        [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def undescribed(descriptions: list[Any], leaves: list[Any] | None, device: torch.device) -> list[Any]:
    """Return the leaves, or empty tensors to receive them."""
    if leaves is not None:
        return [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return [
        torch.empty(item[0], dtype=getattr(torch, item[1]), device=device) if isinstance(item, list) else item
        for item in descriptions
    ]


def joined(outputs: list[Any]) -> Any:
    """Concatenate the outputs of micro-batches, in any structure."""
    if len(outputs) == 1:
        return outputs[0]
    leaves = [torch.utils._pytree.tree_flatten(output) for output in outputs]
    joined = [
        torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*(flat for flat, _ in leaves), strict=True)
    ]
    return torch.utils._pytree.tree_unflatten(joined, leaves[0][1])
