"""Layouts: which part of a map each rank of a grid owns.

::

    Layout(rows=(0, 3, 5), columns=(0, 4, 9))        rank 0 │ rank 1
                                                     ───────┼───────
                                                     rank 2 │ rank 3
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.window import AxisWindow, Window


@dataclass(frozen=True)
class Layout:
    """A map cut into a grid of parts, ranks in row-major order; parts may be uneven, and empty.

    Attributes:
        rows: start of each row of ranks, followed by the height: ``len(rows) - 1`` rows of ranks.
        columns: start of each column of ranks, followed by the width.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def __hash__(self) -> int:
        """Return the hash of all starts; computed once, because planning uses the same layouts as keys many times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.columns))

    @classmethod
    def even(cls, height: int, width: int, grid: tuple[int, int]) -> Layout:
        """Divide a map as evenly as possible."""
        return cls(_even(height, grid[0]), _even(width, grid[1]))

    @property
    def height(self) -> int:
        """Rows of the whole map."""
        return self.rows[-1]

    @property
    def width(self) -> int:
        """Columns of the whole map."""
        return self.columns[-1]

    @cached_property
    def map(self) -> Box:
        """The whole map."""
        return Box.of_size(self.height, self.width)

    @cached_property
    def parts(self) -> Boxes:
        """The box of each rank."""
        return Boxes(tuple(pairwise(self.rows)), tuple(pairwise(self.columns)))

    def through(self, window: Window, height: int, width: int) -> Layout:
        """Return the layout of a window operator's output of this size that sends the fewest input pixels."""
        return _layout(_through(self.rows, window.y, height), _through(self.columns, window.x, width))


@lru_cache(maxsize=1024)  # networks repeat their blocks: their maps share one layout, and its parts
def _layout(rows: tuple[int, ...], columns: tuple[int, ...]) -> Layout:
    return Layout(rows, columns)


def _even(length: int, count: int) -> tuple[int, ...]:
    # Rounded down, so that parts differ by one at most: `_even(8, 3)` is (0, 2, 5, 8).
    return tuple(length * index // count for index in range(count + 1))


@lru_cache(maxsize=1024)  # networks repeat their blocks
def _through(cuts: tuple[int, ...], window: AxisWindow, outputs: int) -> tuple[int, ...]:
    """Return the cuts of a window operator's output along an axis, at positions that send the fewest inputs.

    Args:
        cuts: cuts of the input, from 0 to its length: (0, 3, 5).
        window: the window along this axis.
        outputs: length of the output.
    """
    balanced = _even(outputs, len(cuts) - 1)
    inner = [window.cut(cut, cuts[-1], outputs, even) for cut, even in zip(cuts[1:-1], balanced[1:-1], strict=True)]
    result = [0]
    for cut in inner:
        # A small map may have more cuts than rows: cuts may be equal, which makes a part empty, but must not fall.
        result.append(max(cut, result[-1]))
    return (*result, outputs)
