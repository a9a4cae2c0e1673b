"""Which factor of height and width counts windows, and which the pixels in a window: from the operators that follow.

Window and grid attention divide H into two factors; ranks must share the number of windows::

    H -> (4, 7)    window attention: 4 windows of 7 neighbouring rows; ranks share the first factor
    H -> (7, 4)    grid attention: 4 windows of 7 rows, every fourth row each; ranks share the second factor

The sizes do not determine which case it is. But all end in a shape that tells windows from their pixels, so the factors
are followed through the next views and permutations, with windows h, w and pixels p, q::

    (b h w) c p q       tiles to encode: windows are one dim with images
    b (h w) (p q c)     tokens: pixels are one dim with channels
    b (c p q) h w       space to depth: the same, though before the windows
    (b h w) (p q) c     windows of tokens: in none of these cases, windows come first
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hyfi_core.capture.program import Operator, Program

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_SAME = ("aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten._to_copy.default")

FactorGroups = list[tuple[int, ...]]
"""For each dim of a value, the indices of its factors, in order: ``(0, 2)`` has the size ``sizes[0] * sizes[2]``."""


def windows_first(
    program: Program,
    op: Operator,
    groups: FactorGroups,
    sizes: Sequence[int],
    pairs: Sequence[Sequence[int]],
    batch: Collection[int] = (),
) -> int | None:
    """Return which of two pairs of factors, each of one of y and one of x, counts windows.

    The factors are followed through the views and permutations after ``op``; the last shape decides.

    Args:
        program: the model.
        op: the view that divides height and width into factors.
        groups: the factors of each dim of its result.
        sizes: sizes of the factors.
        pairs: the two pairs (factor of y, factor of x).
        batch: the factors of the batch.

    Returns:
        0 or 1: the index of the pair; None if the factors of a pair do not end in one dim or in neighbouring ones.
    """
    value = op.first_output
    # Without assertions, which compute no values.
    computing = [op for op in program.operators if any(name in program.values for name in op.outputs)]
    for user in computing:
        if value not in user.inputs:
            continue
        groups_after = groups if _is_pointwise(program, user, value) else _after(program, user, groups, sizes)
        # With several users, the shapes that follow may contradict each other.
        user_count = sum(value in each.inputs for each in computing)
        if groups_after is None or user_count != 1:
            break
        groups, value = groups_after, user.first_output
    # A pair in one dim with the batch counts windows; one with channels counts the pixels of a window.
    shared_with = [_shared_with(groups, pair, pairs[1 - at], batch) for at, pair in enumerate(pairs)]
    if shared_with[0] != shared_with[1]:
        return 0 if shared_with[0] > shared_with[1] else 1
    # In a shape with neither, windows come before their pixels.
    dims = [_first_dim(groups, pair) for pair in pairs]
    if dims[0] is None or dims[1] is None or dims[0] == dims[1]:
        return None
    return 0 if dims[0] < dims[1] else 1


def _shared_with(groups: FactorGroups, pair: Sequence[int], other: Sequence[int], batch: Collection[int]) -> int:
    """Return 1 if a pair shares a dim with factors of the batch, -1 if with factors of channels, else 0."""
    together = [factor for group in groups if set(group) & set(pair) for factor in group if factor not in pair]
    if not together or set(together) & set(other):
        return 0
    return 1 if set(together) <= set(batch) else -1


def _first_dim(groups: FactorGroups, pair: Sequence[int]) -> int | None:
    """Return the dim of a pair's factors, the first if they are in two adjacent dims; None if these are apart."""
    y, x = (next(at for at, group in enumerate(groups) if factor in group) for factor in pair)
    return min(y, x) if abs(y - x) <= 1 else None


def _after(program: Program, op: Operator, groups: FactorGroups, sizes: Sequence[int]) -> FactorGroups | None:
    """Return the factors of each dim after an operator; None if it is not a view, or divides a factor."""
    if op.text in _SAME:
        return groups
    if op.text == "aten.permute.default":
        return [groups[dim] for dim in op.args[1]]
    if op.text == "aten.transpose.int":
        result = list(groups)
        first, second = (dim % len(groups) for dim in op.args[1:3])
        result[first], result[second] = result[second], result[first]
        return result
    if op.text not in _VIEWS:
        return None
    remaining, result = [factor for group in groups for factor in group], []
    for side in program.values[op.first_output].shape:
        group: list[int] = []
        left = side
        # Take factors in order while they divide the rest of the dim's size.
        while left > 1 and remaining and left % sizes[remaining[0]] == 0:
            left //= sizes[remaining[0]]
            group.append(remaining.pop(0))
        if left != 1:
            return None
        result.append(tuple(group))
    return result


def _is_pointwise(program: Program, op: Operator, value: str) -> bool:
    """Whether each element of an operator's result is computed from the same element of ``value``."""
    same_shape = program.values[value].shape == program.values[op.first_output].shape
    return same_shape and torch.Tag.pointwise in getattr(op.target, "tags", ())
