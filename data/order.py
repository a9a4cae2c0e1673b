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

import numpy as np
from numpy.typing import NDArray

from data.keyed import keyed_permutation


def epoch_order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of ``n`` samples in an epoch: a permutation, int64, of (seed, epoch) alone."""
    return keyed_permutation(n, "order", int(seed), int(epoch))


class SampleStream:
    """The endless stream of ``n`` samples; see the picture above. Keeps the order of the last two epochs asked for."""

    def __init__(self, n: int, seed: int) -> None:
        """Make the stream of ``n`` samples.

        Raises:
            ValueError: there is no sample.
        """
        if n < 1:
            raise ValueError(f"a stream needs at least one sample, given {n}")
        self.n, self.seed = n, seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def at(self, k: int) -> tuple[int, int]:
        """Return (epoch, index) of sample ``k`` of the stream; the epoch is the key of its augmentation."""
        epoch, position = divmod(k, self.n)
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(self.n, self.seed, epoch)
            newest = max(self._orders, default=epoch)
            self._orders = {e: o for e, o in self._orders.items() if e == newest} | {epoch: order}
        return epoch, int(order[position])


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
