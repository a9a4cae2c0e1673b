"""Stratified assignment of groups of slides to splits: whole groups, classes spread evenly, deterministic.

A greedy algorithm assigns one group at a time: groups of the rarest class first, the largest of these first, ties in an
order given by the seed. A group goes to the part for which the error

    Σ over columns of ((assigned − target) / total of the column)²

falls most (or grows least). The columns are the number of members of each class and of all members; dividing by their
totals lets a rare class weigh as much as a common one. Two restrictions keep parts from ending without a class, or
without any group: see `_allowed_parts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from data.samples.keyed import keyed_permutation
from hyfi_core.errors import RequestError


def assign_groups(
    members: Mapping[str, Sequence[str]], shares: Mapping[str, float], seed: int, *, strict: bool = True
) -> dict[str, str]:
    """Return group -> part: ``{"case 1": "train", "case 2": "val"}``.

    Args:
        members: Group -> the class of each of its members (``""``: none). If all classes are equal, the assignment is
            not stratified.
        shares: Part -> its target share; the shares need not add up to 1.
        seed: Decides ties.
        strict: Whether to refuse a class that has fewer groups than there are parts.

    Raises:
        RequestError: There are fewer groups than parts, in all or (if ``strict``) of some class.
    """
    groups, parts = list(members), list(shares)
    if len(groups) < len(parts):
        raise RequestError(f"{len(groups)} groups cannot fill {len(parts)} splits; ask for fewer folds")
    classes = sorted({name for names in members.values() for name in names})
    counts = np.array([[Counter(members[group])[name] for name in classes] for group in groups], dtype=np.int64)
    if strict:
        _check_every_class(classes, counts, parts)
    targets = np.array([shares[part] for part in parts]) / sum(shares.values())
    assigned = _assign(counts, targets, seed)
    return {group: parts[part] for group, part in zip(groups, assigned, strict=True)}


def _check_every_class(classes: Sequence[str], counts: NDArray[np.int64], parts: Sequence[str]) -> None:
    """Refuse classes that are in fewer groups than there are parts to fill."""
    for name, groups in zip(classes, (counts > 0).sum(axis=0), strict=True):
        if name and groups < len(parts):
            raise RequestError(
                f"class {name!r} is in {groups} groups, which cannot fill {len(parts)} splits; "
                "ask for fewer folds, or leave out --stratify"
            )


def _assign(counts: NDArray[np.int64], shares: NDArray[np.float64], seed: int) -> list[int]:
    """Distribute groups over parts, so that each part gets about its share of every class and of all members.

    Args:
        counts: (groups, classes): number of members.
        shares: Share of each part; they add up to 1.
        seed: Decides the order of groups that are alike.

    Returns:
        Index of the part of each group.
    """
    groups, n_classes = counts.shape
    has_class = counts > 0
    rarest = np.array(
        # The rarest class of a group, the one with the fewest groups, decides when the group is assigned.
        [min((has_class[:, c].sum(), c) for c in range(n_classes) if has_class[g, c])[1] for g in range(groups)]
    )
    # `sorted` is stable: groups with equal keys stay in this random order.
    shuffled = keyed_permutation(groups, "split", int(seed))
    order = sorted(shuffled, key=lambda g: (has_class[:, rarest[g]].sum(), rarest[g], -counts[g].sum()))
    # One column for each class, and one for all members.
    sizes = np.column_stack([counts, counts.sum(axis=1)])
    weight = 1.0 / sizes.sum(axis=0)
    lack = shares[:, None] * sizes.sum(axis=0)[None, :]  # target − assigned, for each part and column
    without = np.ones((len(shares), n_classes), bool)  # (parts, classes): the part has no group of the class yet
    groups_left = Counter(rarest.tolist())
    result = [0] * groups
    for position, g in enumerate(order):
        c = int(rarest[g])
        allowed = _allowed_parts(without, c, groups - position, groups_left[c])
        # How much the error falls: lack² − (lack − size)² = (2 · lack − size) · size, summed over columns.
        gain = (((2 * lack - sizes[g]) * sizes[g]) * weight**2).sum(axis=1)
        # Rounded: equal gains must be a tie on every machine, whatever the last bits of their sums.
        part = int(np.argmax(np.where(allowed, np.round(gain, 12), -np.inf)))
        result[g], groups_left[c] = part, groups_left[c] - 1
        lack[part] -= sizes[g]
        # For all classes of the group, not only its rarest.
        without[part] &= ~has_class[g]
    return result


def _allowed_parts(without: NDArray[np.bool_], c: int, groups_left: int, left_of_class: int) -> NDArray[np.bool_]:
    """Return ``(parts,)``: whether the next group, whose rarest class is ``c``, may go to a part.

    - If only as many groups are left as there are empty parts: the empty parts.
    - Else, if at most as many groups of the class are left as there are parts without it: the parts without it.
    - Else: all parts.

    Args:
        without: ``(parts, classes)``: whether a part has no group of a class.
        c: Index of the class.
        groups_left: Number of groups that are not assigned yet, including the next one.
        left_of_class: How many of these have the rarest class ``c``.
    """
    # First, because a part without any group is worse than a part without a class.
    empty = np.asarray(without.all(axis=1), dtype=bool)
    if groups_left <= empty.sum():
        return empty
    if 0 < left_of_class <= without[:, c].sum():
        return without[:, c]
    return np.ones(len(without), bool)
