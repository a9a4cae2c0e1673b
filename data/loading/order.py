"""The order in which samples are learnt: one endless stream, cut into steps that are always full.

::

    epoch          0                1                2
    stream   | 3 0 4 1 2 | 1 4 2 0 3 | 0 2 ...          five samples, shuffled anew in each epoch
    steps    |- 0 -|- 1 -|-.2.-|- 3 -|- 4 -|            two replicas, one sample each

Sample ``k`` of the stream is sample ``k mod n`` of epoch ``k div n``. Nothing is dropped and nothing is repeated
within an epoch; a step that begins in one epoch may end in the next. So the step's number is all that a resumed run
needs, and how many ranks there are never enters.
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
    """Return the order of ``n`` samples in an epoch: a permutation, int64, of (seed, epoch) alone."""
    return keyed_permutation(n, "order", int(seed), int(epoch))


def drawn_order(weights: Sequence[float], seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of an epoch of n draws in which sample i comes up ``n · wᵢ / Σw`` times, int64 (n,).

    Systematic sampling: the samples, shuffled anew, lie side by side on a line, each as long as its weight, and n
    points at equal distances are laid over it from a random start. So each comes up as often as its share says, but for
    rounding, in every epoch: none that weighs enough is left out, none is repeated without need. In whole numbers
    throughout: the same on every machine. (Madow, Ann Math Stat 20:333, 1949.)
    """
    n = len(weights)
    line = keyed_permutation(n, "line", int(seed), int(epoch))
    total = sum(Fraction(weight) for weight in weights)
    ends = np.cumsum([int(Fraction(weights[i]) * _UNITS * n / total) for i in line])
    start = int(keyed_bits(1, "start", int(seed), int(epoch))[0] >> np.uint64(32))
    points = [((point << 32) + start) * int(ends[-1]) // (n << 32) for point in range(n)]
    drawn = line[np.searchsorted(ends, points, side="right")]
    return drawn[epoch_order(n, seed, epoch)]


class SampleStream:
    """The endless stream of ``n`` samples; see the picture above. Keeps the order of the last two epochs asked for.

    With ``weights`` an epoch is n draws by :func:`drawn_order` instead of a permutation.
    """

    def __init__(self, n: int, seed: int, weights: Sequence[float] | None = None) -> None:
        """Make the stream of ``n`` samples.

        Raises:
            ValueError: there is no sample, or weights are not n numbers ≥ 0, some of them above.
        """
        if n < 1:
            raise ValueError(f"a stream needs at least one sample, given {n}")
        if weights is not None and not (len(weights) == n and min(weights) >= 0 and 0 < sum(weights) < np.inf):
            raise ValueError(f"{n} samples need {n} weights ≥ 0, not all of them 0")
        self.n, self.seed, self.weights = n, seed, tuple(weights) if weights is not None else None
        self._orders: dict[int, list[tuple[int, int]]] = {}

    def at(self, k: int) -> tuple[int, int]:
        """Return (key, index) of sample ``k`` of the stream.

        The key, of its augmentation, is the epoch; where a sample comes up again in the same epoch, the epoch and how
        often it has come up, so that it is not varied alike.
        """
        epoch, position = divmod(k, self.n)
        order = self._orders.get(epoch)
        if order is None:
            order = self._order(epoch)
            newest = max(self._orders, default=epoch)
            self._orders = {e: o for e, o in self._orders.items() if e == newest} | {epoch: order}
        return order[position]

    def _order(self, epoch: int) -> list[tuple[int, int]]:
        if self.weights is None:
            return [(epoch, index) for index in epoch_order(self.n, self.seed, epoch).tolist()]
        seen: Counter[int] = Counter()
        order = []
        for index in drawn_order(self.weights, self.seed, epoch).tolist():
            order.append((epoch + seen[index] * _OCCURRENCE, index))
            seen[index] += 1
        return order


def step_samples(n: int, batch_size: int, replicas: int, seed: int, epoch: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the steps that begin in ``epoch``: for each replica of each step a tuple of sample indices.

    ``batch_size`` is that of one replica. The last step may end with samples of the next epoch; who augments them asks
    :meth:`SampleStream.at`, which says the epoch too.
    """
    stream, of_step = SampleStream(n, seed), batch_size * replicas
    first, end = -(-epoch * n // of_step), -(-(epoch + 1) * n // of_step)
    return [
        tuple(
            tuple(stream.at(k)[1] for k in range(start, start + batch_size))
            for start in range(step * of_step, (step + 1) * of_step, batch_size)
        )
        for step in range(first, end)
    ]


def balanced_weights(slides: Sequence[SlideRef]) -> tuple[float, ...]:
    """Return a weight for each slide so that every existing class is drawn equally often."""
    counts = Counter(slide.label for slide in slides)
    return tuple(1.0 / counts[slide.label] for slide in slides)


def column_weights(slides: Sequence[SlideRef], labels: Labels, column: str) -> tuple[float, ...]:
    """Return each slide's number in a column of the labels: how often it is drawn, against the others.

    Raises:
        RequestError: there is no such column, a slide's value is no number ≥ 0, or all are 0.
    """
    if not labels.rows or column not in labels.rows[0]:
        known = ", ".join(labels.rows[0]) if labels.rows else "none"
        raise RequestError(f"data.weights_column: the labels have no column {column!r}; they have: {known}")
    values = {row[labels.key]: row[column] for row in labels.rows if row[column]}
    weights = tuple(_number(slide, values, labels, column) for slide in slides)
    if not sum(weights):
        raise RequestError(
            f"data.weights_column: {column!r} is 0 for every training slide; at least one must be above 0"
        )
    return weights


def _number(slide: SlideRef, values: dict[str, str], labels: Labels, column: str) -> float:
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
