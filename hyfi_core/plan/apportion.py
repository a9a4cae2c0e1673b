"""Apportioning: a batch dealt to replicas of unequal speed, so that the slowest of them is done as early as can be.

::

    seconds of one sample     1      1      4          nine samples
    samples                   4      4      1          in proportion to speed: 4 : 4 : 1
    seconds of a step         4      4      4          alike, a step of 12 seconds took 3 · 4

Samples are dealt one by one, each to the replica that would then be done first. This is D'Hondt's method with speeds
for votes: shares in proportion to speed, and, unlike with largest remainders, rounded so that no other deal of the same
samples is done earlier. (Balinski, Young: Fair Representation, 1982.) Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hyfi_core.errors import RequestError


def apportion(samples: int, seconds: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Return how many samples each replica takes: at least one unit, whole units, together all of them.

    Of several that would be done equally early, the first gets the next unit; so the same seconds give the same shares,
    on every machine.

    Args:
        samples: of the whole batch.
        seconds: that each replica takes for one unit; only their ratios matter.
        unit: the shares are multiples of it: the micro-batches of a replica, each of which gets a sample.

    Raises:
        RequestError: there is not a unit for each replica, or ``samples`` is no multiple of the unit.
        ValueError: a number of seconds is not above 0, or not finite.
    """
    if not seconds or not all(0 < taken < math.inf for taken in seconds):
        raise ValueError(f"seconds are {list(seconds)}; each must be a finite number above 0")
    replicas, units = len(seconds), samples // unit
    if samples % unit or units < replicas:
        raise RequestError(
            f"a batch of {samples} cannot be divided among {replicas} replicas in multiples of {unit}, at least "
            f"{unit} for each; use a batch of {max(replicas, units) * unit}, fewer micro-batches or fewer replicas"
        )
    taken = [Fraction(one) for one in seconds]
    shares = [1] * replicas
    for _ in range(units - replicas):
        first = min(range(replicas), key=lambda replica: (shares[replica] + 1) * taken[replica])
        shares[first] += 1
    return tuple(share * unit for share in shares)
