"""Apportionment of a batch among replicas of unequal speed, minimising the time of the slowest.

::

    seconds of one sample     1      1      4          nine samples
    samples                   4      4      1          in proportion to speed: 4 : 4 : 1
    seconds of a step         4      4      4          with 3 samples each: 12 seconds

Samples are assigned one by one, each to the replica that would then finish first. This is D'Hondt's method with speeds
as votes: samples in proportion to speed, rounded so that no other assignment of the same samples finishes earlier.
(Balinski, Young: Fair Representation, 1982.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hyfi_core.errors import RequestError


def apportion(samples: int, seconds: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Return how many samples each replica takes: whole units, at least one each.

    Of several that would finish at the same time, the first gets the next unit, so the result is deterministic.

    Args:
        samples: number of samples of the whole batch.
        seconds: seconds in which each replica computes one unit; only their ratios matter.
        unit: the results are multiples of it: the number of micro-batches, since each needs a sample.

    Raises:
        RequestError: there are fewer units than replicas, or ``samples`` is not a multiple of the unit.
        ValueError: a number of seconds is not above 0, or not finite.
    """
    if not seconds or not all(0 < duration < math.inf for duration in seconds):
        raise ValueError(f"seconds are {list(seconds)}; each must be a finite number above 0")
    replicas, units = len(seconds), samples // unit
    if samples % unit or units < replicas:
        raise RequestError(
            f"a batch of {samples} cannot be divided among {replicas} replicas in multiples of {unit}, at least "
            f"{unit} for each; use a batch of {max(replicas, units) * unit}, fewer micro-batches or fewer replicas"
        )
    # Fractions are exact: products of floats that should be equal may differ in the last bit, which would decide ties.
    durations = [Fraction(duration) for duration in seconds]
    counts = [1] * replicas
    for _ in range(units - replicas):
        # ``min`` returns the first of equals.
        earliest = min(range(replicas), key=lambda replica: (counts[replica] + 1) * durations[replica])
        counts[earliest] += 1
    return tuple(count * unit for count in counts)
