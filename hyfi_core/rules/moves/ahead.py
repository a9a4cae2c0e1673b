"""Looking ahead: which factor of height and width numbers the windows, and which the pixels within one.

    H -> (4, 7)    windows of 7 rows: four of them, shared by the ranks; each needs its 7 rows
    H -> (7, 4)    a grid of 7 rows: four of them, every fourth row in one; the ranks share the 4

Sizes alone do not tell. But what follows does: both kinds end in one dim that numbers windows and, behind it, one that
numbers pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyfi_core.capture.program import Operator, Program

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_SAME = ("aten.clone.default", "aten.contiguous.default", "aten.alias.default")

Groups = list[tuple[int, ...]]
"""For each dim of a value, the factors that it holds, in order."""


def windows_first(
    program: Program, op: Operator, groups: Groups, sizes: Sequence[int], pairs: Sequence[Sequence[int]]
) -> int | None:
    """Return which of two pairs of factors (of y and of x) ends in an earlier dim than the other, alone behind others.

    Args:
        program: the model.
        op: the view that makes the factors dims.
        groups: the factors of each dim of its result.
        sizes: of the factors.
        pairs: (factor of y, factor of x) of either kind.

    Returns:
        0 or 1; None where one of the pairs does not end as the last factors of one dim.
    """
    found = _places(groups, pairs)
    value = op.first_output
    for after in program.operators:
        if value not in after.inputs:
            continue
        groups_now = _after(program, after, groups, sizes)
        users = sum(value in other.inputs for other in program.operators)
        if groups_now is None or users != 1:
            break
        groups, value = groups_now, after.first_output
        found = _places(groups, pairs)
    if None in found or found[0] == found[1]:
        return None
    return 0 if found[0] < found[1] else 1  # type: ignore[operator]


def _places(groups: Groups, pairs: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the dim whose last factors each pair is; for one of the pairs, two dims beside each other do as well."""
    merged = [next((at for at, group in enumerate(groups) if group[-2:] == tuple(pair)), None) for pair in pairs]
    if merged[0] is None and merged[1] is None:
        return merged
    beside = [
        next((at for at in range(len(groups) - 1) if groups[at : at + 2] == [(y,), (x,)]), None) for y, x in pairs
    ]
    return [one if one is not None else other for one, other in zip(merged, beside, strict=True)]


def _after(program: Program, op: Operator, groups: Groups, sizes: Sequence[int]) -> Groups | None:
    """Return what the dims hold after an operator; None for one that is no view, or takes a factor apart."""
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
    rest, result = [factor for group in groups for factor in group], []
    for side in program.values[op.first_output].shape:
        group: list[int] = []
        left = side
        while left > 1 and rest and left % sizes[rest[0]] == 0:
            left //= sizes[rest[0]]
            group.append(rest.pop(0))
        if left != 1:
            return None
        result.append(tuple(group))
    return result
