"""Which rank writes which tensor of a checkpoint, where several ranks have the same ones.

::

    stage 0 on ranks 0 to 3, in two replicas      0  1  2  3    4  5  6  7       all eight have the same weights
    500 MB: three shares of 128 MB or more        █     █          █             far apart: on several nodes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEAST_BYTES = 2**27
"""Weights of a share, if there are several: more and smaller files would burden a shared file system, and readers."""


def sharing(weight_bytes: int, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that share the writing of weights that all of them hold; the first is one of them."""
    shares = min(len(ranks), max(1, weight_bytes // LEAST_BYTES))
    return [ranks[number * len(ranks) // shares] for number in range(shares)]


def deal(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Return tensor -> the rank that writes it; the same on every rank.

    The largest tensors are dealt first, each to the rank with the fewest bytes so far. So no rank gets more than the
    mean and one tensor.

    Args:
        sizes: bytes of each tensor.
        ranks: the ranks that have all of these tensors.
    """
    loads = dict.fromkeys(sharing(sum(sizes.values()), ranks), 0)
    writers = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: equal sizes in the given order
        writers[name] = rank = min(loads, key=lambda rank: loads[rank])
        loads[rank] += sizes[name]
    return writers
