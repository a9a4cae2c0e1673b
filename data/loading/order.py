"""The order of training samples: one endless stream, divided into steps that are always full.

::

    epoch          0                1                2
    stream   | 3 0 4 1 2 | 1 4 2 0 3 | 0 2 ...          five samples, shuffled in each epoch
    steps    |- 0 -|- 1 -|- 2 -|- 3 -|- 4 -|            two replicas, one sample each

Sample ``k`` of the stream is sample ``k mod n`` of epoch ``k div n``. Within an epoch no sample is dropped or repeated;
a step that starts in one epoch may end in the next. So a resumed run needs only the step's number, and the order does
not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from data.samples.dataset import SlideRef
from data.samples.keyed import keyed_bits, keyed_permutation
from data.samples.labels import Labels
from hyfi_core.errors import RequestError

_UNITS = 2**40
_OCCURRENCE = 2**32


def epoch_order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of ``n`` samples in an epoch: a permutation (int64) that depends only on (n, seed, epoch)."""
    return keyed_permutation(n, "order", int(seed), int(epoch))


def weighted_order(weights: Sequence[float], seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of an epoch of n draws in which sample i occurs about ``n · wᵢ / Σw`` times, int64 (n,).

    Systematic sampling (Madow, Ann Math Stat 20:333, 1949): the shuffled samples are intervals on a line, each as long
    as its weight; n equidistant points with a random start draw the samples they fall into. So each sample occurs
    ``n · wᵢ / Σw`` times, rounded down or up, in every epoch. Computed in integers: the same on every machine::

        weights  |-----2-----|--1--|--------3--------|    2 + 1 + 3 = 6, n = 3
        points        ·           ·           ·           drawn 1, 1 and 1 times; with another start 1, 0 and 2
    """
    n = len(weights)
    line = keyed_permutation(n, "line", int(seed), int(epoch))
    total = sum(Fraction(weight) for weight in weights)
    # Exact fractions, rounded to whole units once: float sums would depend on the order of the samples.
    ends = np.cumsum([int(Fraction(weights[i]) * _UNITS * n / total) for i in line])
    # 32 random bits: a start in [0, 1) of the distance between two points.
    start = int(keyed_bits(1, "start", int(seed), int(epoch))[0] >> np.uint64(32))
    # In units of 2⁻³² of the distance between two points, so that all numbers are whole.
    points = [((point << 32) + start) * int(ends[-1]) // (n << 32) for point in range(n)]
    # "right": intervals are half-open, so a point on a boundary draws the next sample, and weight 0 is never drawn.
    drawn = line[np.searchsorted(ends, points, side="right")]
    # Shuffled again: points in order would draw all copies of one sample in a row.
    return drawn[epoch_order(n, seed, epoch)]


class SampleStream:
    """The endless stream of ``n`` samples, as in this module's docstring. Caches the order of two epochs.

    With ``weights``, an epoch is n draws by :func:`weighted_order` instead of a permutation.
    """

    def __init__(self, n: int, seed: int, weights: Sequence[float] | None = None) -> None:
        """Create the stream.

        Raises:
            ValueError: ``n`` is 0, or ``weights`` are not n finite numbers ≥ 0 with a sum above 0.
        """
        if n < 1:
            raise ValueError(f"a stream needs at least one sample, given {n}")
        if weights is not None and not (len(weights) == n and min(weights) >= 0 and 0 < sum(weights) < np.inf):
            raise ValueError(f"{n} samples need {n} weights ≥ 0, not all of them 0")
        self.n, self.seed, self.weights = n, seed, tuple(weights) if weights is not None else None
        self._orders: dict[int, list[tuple[int, int]]] = {}

    def at(self, k: int) -> tuple[int, int]:
        """Return (key of the augmentation, dataset index) of sample ``k`` of the stream.

        The key is the epoch. If a sample occurs several times in an epoch, the key also counts its occurrences, so that
        each is augmented differently.
        """
        epoch, position = divmod(k, self.n)
        order = self._orders.get(epoch)
        if order is None:
            order = self._order(epoch)
            # Two epochs stay: a batch may begin in one and end in the next.
            newest = max(self._orders, default=epoch)
            self._orders = {e: o for e, o in self._orders.items() if e == newest} | {epoch: order}
        return order[position]

    def _order(self, epoch: int) -> list[tuple[int, int]]:
        """Return (key of the augmentation, dataset index) of each sample of an epoch; see ``at``."""
        if self.weights is None:
            return [(epoch, index) for index in epoch_order(self.n, self.seed, epoch).tolist()]
        repeats: Counter[int] = Counter()
        order = []
        for index in weighted_order(self.weights, self.seed, epoch).tolist():
            # _OCCURRENCE is larger than any epoch, so each (epoch, repeat) has a key of its own.
            order.append((epoch + repeats[index] * _OCCURRENCE, index))
            repeats[index] += 1
        return order


def balanced_weights(slides: Sequence[SlideRef]) -> tuple[float, ...]:
    """Return a weight for each slide with which all classes that occur are drawn equally often."""
    counts = Counter(slide.label for slide in slides)
    return tuple(1.0 / counts[slide.label] for slide in slides)


def column_weights(slides: Sequence[SlideRef], labels: Labels, column: str) -> tuple[float, ...]:
    """Return the weight of each slide from a column of the labels: how often it is drawn, relative to the others.

    Raises:
        RequestError: There is no such column, a slide's value is not a number ≥ 0, two rows of a slide or case have
            different values, all values are 0, or they are too large.
    """
    if not labels.rows or column not in labels.rows[0]:
        columns = ", ".join(labels.rows[0]) if labels.rows else "none"
        raise RequestError(f"data.weights_column: the labels have no column {column!r}; they have: {columns}")
    values: dict[str, str] = {}
    for row in labels.rows:  # of slides or of cases: ``labels.key`` is slide_id or case_id
        if row[column] and not _alike(values.setdefault(row[labels.key], row[column]), row[column]):
            raise RequestError(
                f"data.weights_column: {labels.key} {row[labels.key]} has two values in {column!r}: "
                f"{values[row[labels.key]]!r} and {row[column]!r}; write one of them"
            )
    weights = tuple(_number(slide, values, labels, column) for slide in slides)
    if math.isinf(sum(weights)):
        raise RequestError(
            f"data.weights_column: the numbers in {column!r} are too large to be added; use smaller ones"
        )
    if not sum(weights):
        raise RequestError(
            f"data.weights_column: {column!r} is 0 for every training slide; at least one must be above 0"
        )
    return weights


def _alike(one: str, other: str) -> bool:
    """Whether two texts are the same weight, such as 1 and 1.0."""
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


def _number(slide: SlideRef, values: dict[str, str], labels: Labels, column: str) -> float:
    """Return the weight of a slide from a column of the labels."""
    text = values.get(slide.slide_id if labels.key == "slide_id" else slide.case_id, "")
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and number >= 0):
        raise RequestError(
            f"data.weights_column: slide {slide.slide_id} has {text!r} in {column!r}; allowed: a number ≥ 0"
        )
    return number
