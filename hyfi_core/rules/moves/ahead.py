"""Which factor of height and width counts windows, and which the pixels in a window: from the operators that follow.

Window and grid attention divide H into two factors; ranks must share the number of windows::

    H -> (4, 7)    window attention: 4 windows of 7 neighbouring rows; ranks share the first factor
    H -> (7, 4)    grid attention: 4 windows of 7 rows, every fourth row each; ranks share the second factor

The sizes do not determine which case it is. But both end in a shape with a dim of windows before a dim of pixels, so
the factors are followed through the next views and permutations.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyfi_core.capture.program import Operator, Program

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_SAME = ("aten.clone.default", "aten.contiguous.default", "aten.alias.default")

FactorGroups = list[tuple[int, ...]]
"""For each dim of a value, the numbers of the factors that it holds, in order; of (0, 2): ``sizes[0] * sizes[2]``."""


def windows_first(
    program: Program, op: Operator, groups: FactorGroups, sizes: Sequence[int], pairs: Sequence[Sequence[int]]
) -> int | None:
    """Return which of two pairs of factors, (of y, of x), ends in an earlier dim than the other.

    Args:
        program: the model.
        op: the view that divides height and width into factors.
        groups: the factors of each dim of its result.
        sizes: of the factors.
        pairs: the two pairs (factor of y, factor of x).

    Returns:
        0 or 1: the pair that counts windows; None if a pair does not end as the last factors of one dim.
    """
    dims = _places(groups, pairs)
    value = op.first_output
    for after in program.operators:
        if value not in after.inputs:
            continue
        groups_now = _after(program, after, groups, sizes)
        users = sum(value in user.inputs for user in program.operators)
        if groups_now is None or users != 1:
            break
        groups, value = groups_now, after.first_output
        dims = _places(groups, pairs)
    if None in dims or dims[0] == dims[1]:
        return None
    return 0 if dims[0] < dims[1] else 1  # type: ignore[operator]


def _places(groups: FactorGroups, pairs: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the dim whose last factors are each pair, None if none is.

    If one pair is in one dim, the other may also be in two neighbouring dims.
    """
    merged = [next((at for at, group in enumerate(groups) if group[-2:] == tuple(pair)), None) for pair in pairs]
    if merged[0] is None and merged[1] is None:
        return merged
    beside = [
        next((at for at in range(len(groups) - 1) if groups[at : at + 2] == [(y,), (x,)]), None) for y, x in pairs
    ]
    return [single if single is not None else pair for single, pair in zip(merged, beside, strict=True)]


def _after(program: Program, op: Operator, groups: FactorGroups, sizes: Sequence[int]) -> FactorGroups | None:
    """Return the factors of each dim after an operator; None if it is no view, or divides a factor."""
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
        while left > 1 and remaining and left % sizes[remaining[0]] == 0:
            left //= sizes[remaining[0]]
            group.append(remaining.pop(0))
        if left != 1:
            return None
        result.append(tuple(group))
    return result
