"""Operators whose outputs read intervals of the input along y and x, independently of each other.

    nearest ×1.5   input    0   1   2   3
                   output   0 1 2 3 4 5          output 3 reads input 2: interval(3, 4) = (2, 3)

The intervals determine where to cut the output so that the fewest pixels move, and the box that each rank needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hyfi_core.ops.constants import Constant
from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split

_MOST_CANDIDATES = 64


@dataclass(frozen=True)
class Axis:
    """The access pattern of an operator along one axis.

    Attributes:
        outputs: number of outputs.
        interval: (start, stop) of a non-empty range of outputs -> (start, stop) of the inputs that they read, which may
            extend beyond the map.
    """

    outputs: int
    interval: Callable[[int, int], tuple[int, int]]

    @classmethod
    def of_table(cls, table: Sequence[int]) -> Axis:
        """Return the axis on which output ``i`` reads only input ``table[i]``."""
        # Ends of an ascending table, as of a slice, are its extremes: cutting a large map computes many intervals.
        ascending = all(a <= b for a, b in pairwise(table))

        def interval(start: int, stop: int) -> tuple[int, int]:
            if ascending:
                return table[start], table[stop - 1] + 1
            return min(table[start:stop]), max(table[start:stop]) + 1

        return cls(len(table), interval)

    @classmethod
    def shifted(cls, outputs: int, by: int) -> Axis:
        """Return the axis on which output ``i`` reads input ``i + by``."""
        return cls(outputs, lambda start, stop: (start + by, stop + by))

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """Return the interval of the inputs that a range of outputs reads; ``(0, 0)`` for an empty one."""
        return self.interval(start, stop) if start < stop else (0, 0)

    def through(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cuts of the outputs, as (0, …, outputs), for inputs that are cut at ``cuts``."""
        result = [0]
        for cut in cuts[1:-1]:
            # Ascending: a cut before its predecessor would make a part of negative size.
            result.append(max(result[-1], self._cut(cut, cuts[-1])))
        return (*result, self.outputs)

    def _cut(self, cut: int, inputs: int) -> int:
        """Return where to cut the output so that few inputs move across ``cut``; of equal cuts, the most balanced.

        Two numbers of inputs move: of those after ``cut`` that outputs before the output cut read, and of those before
        ``cut`` that outputs after it read. As the output cut grows, the first never falls: it is 0 up to ``low``. The
        second never grows: it is 0 from ``high`` on. Outside of that range, one is 0 and the other only grows.
        """
        every_cut = range(self.outputs + 1)
        low = bisect_left(every_cut, 1, key=lambda out: self._moved_down(out, cut, inputs)) - 1
        high = bisect_left(every_cut, 0, key=lambda out: -self._moved_up(out, cut))
        first, last = max(0, min(low, high)), min(self.outputs, max(low, high))
        # In a long range not every cut is tried: the best of those may move a few inputs more.
        step = max(1, (last - first) // _MOST_CANDIDATES)
        balanced = self.outputs * cut / max(inputs, 1)
        return min(
            range(first, last + 1, step),
            key=lambda out: (
                self._moved_down(out, cut, inputs) + self._moved_up(out, cut),
                abs(out - balanced),
            ),
        )

    def _moved_down(self, out: int, cut: int, inputs: int) -> int:
        """Return the number of inputs from ``cut`` on that outputs before ``out`` read."""
        return max(0, min(self.interval(0, out)[1], inputs) - cut) if out > 0 else 0

    def _moved_up(self, out: int, cut: int) -> int:
        """Return the number of inputs before ``cut`` that outputs from ``out`` on read."""
        return max(0, cut - max(self.interval(out, self.outputs)[0], 0)) if out < self.outputs else 0


@dataclass(frozen=True)
class Reach:
    """How an operator is computed on this rank: the layout of its output, and the input to compute it from.

    Attributes:
        split: layout of the output; height and width are the same dims as in the input.
        canvas: name of the value with the input that this rank needs.
        need: the box of that input; may extend beyond the map.
        part: the box of the output that this rank owns.
    """

    split: Split
    canvas: str
    need: Box
    part: Box


def reach(builder: Builder, name: str, axes: tuple[Axis, Axis], fill: float = 0.0) -> Reach:
    """Choose the layout of an operator's output and emit the redistribution of its input.

    Args:
        builder: builder of the rank's program.
        name: the input, a split value.
        axes: the operator along (y, x).
        fill: value outside the map.
    """
    split = builder.splits[name]
    layout = Layout(axes[0].through(split.layout.rows), axes[1].through(split.layout.columns))
    need = layout.parts.each(axes[0].reads, axes[1].reads)
    canvas = builder.moved(name, need, fill=fill)
    return Reach(Split(layout, split.dims), canvas, need[builder.rank], layout.parts[builder.rank])


def scattered(outputs: int, stride: int, padding: int, span: int) -> Axis:
    """Return the axis on which input ``i`` adds to the ``span + 1`` outputs from ``i * stride - padding``."""

    def interval(start: int, stop: int) -> tuple[int, int]:
        # Rounded up to the first input whose last output is not before ``start``.
        first = -(-(start + padding - span) // stride)
        return first, max(first, (stop - 1 + padding) // stride) + 1

    return Axis(outputs, interval)


class Selection:
    """Indices along a dim, known before the run.

    Args:
        indices: one-dimensional, int64, on the host.
    """

    def __init__(self, indices: torch.Tensor) -> None:
        self._indices = Constant(indices)
        self._count = indices.numel()
        # Determined now, on the host: in a step, the host would have to wait for the GPU.
        consecutive = self._count > 0 and bool((indices.diff() == 1).all())
        self._first = int(indices[0]) if consecutive else None

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return ``tensor`` at these indices along ``dim``: a view if they are consecutive, itself if they are all.

        Not a view of all: autograd's gradient of a view is a copy in another memory format. Everything before it in
        the model would then compute with two formats, which takes several times as long.
        """
        if self._first == 0 and self._count == tensor.shape[dim]:
            return tensor
        if self._first is not None:
            return tensor.narrow(dim, self._first, self._count)
        return tensor.index_select(dim, self._indices.on(tensor.device, torch.int64))
