"""Operators of a graph that other operators replace, which have derivatives and rules."""

from __future__ import annotations

from typing import Any

import torch


def copied(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Return ``aten.copy``, the source with the dtype and shape of ``into``, by two operators with derivatives."""
    return source.to(into.dtype).expand(into.shape)


def _difference(
    x: torch.Tensor, n: int = 1, dim: int = -1, prepend: torch.Tensor | None = None, append: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``torch.diff`` as slices and subtractions, which have rules."""
    # As in PyTorch, without ``prepend`` and ``append``; a copy, since the result must not be the input itself.
    if n == 0:
        return x.clone()
    ends = [part for part in (prepend, x, append) if part is not None]
    result = torch.cat(ends, dim) if len(ends) > 1 else x
    for _ in range(n):
        above, below = result.narrow(dim, 1, result.shape[dim] - 1), result.narrow(dim, 0, result.shape[dim] - 1)
        # PyTorch refuses ``-`` for bools; its ``diff`` of bools is this.
        result = above ^ below if result.dtype == torch.bool else above - below
    return result


def _rotated(x: torch.Tensor, k: int = 1, dims: tuple[int, int] = (0, 1)) -> torch.Tensor:
    """Return ``torch.rot90`` of ``k`` quarter turns as flips and a transposition, which have rules."""
    first, second = dims
    quarter_turns = k % 4
    if quarter_turns == 0:
        return x.clone()
    if quarter_turns == 2:
        return x.flip((second,)).flip((first,))
    return x.flip((second if quarter_turns == 1 else first,)).transpose(first, second).clone()


REPLACED: dict[Any, Any] = {torch.ops.aten.diff.default: _difference, torch.ops.aten.rot90.default: _rotated}
"""Operator without a rule -> function that computes it by operators with rules."""
