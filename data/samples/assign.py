"""Dealing groups of slides into parts of given shares: whole groups, every class spread alike, the same each time.

Groups are dealt one by one, those of the rarest class first and among them the largest. Each goes to the part that
lacks most: the one for which Σ over classes, and over all members as one more, of (what it has − its share)² falls most
(or grows least), each counted in shares of its own total so that a rare class weighs as much as a common one. Ties and
equals are broken by the seed. While a class has no more groups left than there are parts without it, its groups go to
those parts alone, and so with groups and empty parts: every part gets something, and every class whose own groups are
enough.
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
    """Deal groups into parts.

    Args:
        members: group to the class of each of its members (``""``: none); equal classes everywhere: not stratified.
        shares: part to its share; they need not add up to 1.
        seed: another one, another deal.
        strict: refuse a class that has fewer groups than there are parts.

    Returns:
        group to part.

    Raises:
        RequestError: fewer groups than parts, or than parts for some class.
    """
    groups, parts = list(members), list(shares)
    if len(groups) < len(parts):
        raise RequestError(f"{len(groups)} groups cannot fill {len(parts)} splits; ask for fewer folds")
    classes = sorted({name for names in members.values() for name in names})
    counts = np.array([[Counter(members[group])[name] for name in classes] for group in groups], dtype=np.int64)
    if strict:
        _check_every_class(classes, counts, parts)
    of_shares = np.array([shares[part] for part in parts]) / sum(shares.values())
    dealt = _deal(counts, of_shares, seed)
    return {group: parts[part] for group, part in zip(groups, dealt, strict=True)}


def _check_every_class(classes: Sequence[str], counts: NDArray[np.int64], parts: Sequence[str]) -> None:
    for name, groups in zip(classes, (counts > 0).sum(axis=0), strict=True):
        if name and groups < len(parts):
            raise RequestError(
                f"class {name!r} is in {groups} groups, which cannot fill {len(parts)} splits; "
                "ask for fewer folds, or leave out --stratify"
            )


def _deal(counts: NDArray[np.int64], shares: NDArray[np.float64], seed: int) -> list[int]:
    """Return the part of each group; ``counts`` is (groups, classes)."""
    groups, n_classes = counts.shape
    has = counts > 0
    rarest = np.array([min((has[:, c].sum(), c) for c in range(n_classes) if has[g, c])[1] for g in range(groups)])
    shuffled = keyed_permutation(groups, "split", int(seed))
    order = sorted(shuffled, key=lambda g: (has[:, rarest[g]].sum(), rarest[g], -counts[g].sum()))
    sizes = np.column_stack([counts, counts.sum(axis=1)])
    weight = 1.0 / sizes.sum(axis=0)
    lack = shares[:, None] * sizes.sum(axis=0)[None, :]
    without = np.ones((len(shares), n_classes), bool)
    left = Counter(rarest.tolist())
    result = [0] * groups
    for place, g in enumerate(order):
        c = int(rarest[g])
        allowed = without.all(axis=1)
        if groups - place > allowed.sum():
            allowed = without[:, c] if 0 < left[c] <= without[:, c].sum() else np.ones(len(shares), bool)
        gain = (((2 * lack - sizes[g]) * sizes[g]) * weight**2).sum(axis=1)
        part = int(np.argmax(np.where(allowed, np.round(gain, 12), -np.inf)))
        result[g], left[c] = part, left[c] - 1
        lack[part] -= sizes[g]
        without[part] &= ~has[g]
    return result
