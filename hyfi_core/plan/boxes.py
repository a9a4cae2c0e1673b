"""One box for each rank of a grid, as an interval for each row and one for each column of ranks.

                 columns  [0, 4)  [3, 9)
    rows [0, 3)           rank 0  rank 1        rank 1 has the box [0, 3) x [3, 9)
         [2, 5)           rank 2  rank 3

What ranks own and need is always such a product, because operators reach along y and x independently of each other. A
grid of R x C ranks then takes R + C intervals instead of R · C boxes, and a rank finds its neighbours by looking at one
row and one column of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from hyfi_core.plan.box import Box

Interval = tuple[int, int]
"""Half-open; empty if its end is not after its start."""


@dataclass(frozen=True)
class Boxes(Sequence[Box]):
    """One box for each rank, in row-major order; boxes may overlap, be empty, and extend beyond the map.

    Attributes:
        rows: intervals along y, one for each row of ranks.
        columns: intervals along x, one for each column of ranks.
        turned: whether the map was transposed while ranks kept their places: then ``rows`` has one interval for each
            column of ranks, ``columns`` one for each row.
    """

    rows: tuple[Interval, ...]
    columns: tuple[Interval, ...]
    turned: bool = False

    def __eq__(self, other: object) -> bool:
        """Whether both have the same intervals; identity and hashes are compared first, because that is fast."""
        if self is other:
            return True
        if not isinstance(other, Boxes):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.rows == other.rows
            and self.columns == other.columns
            and self.turned == other.turned
        )

    def __hash__(self) -> int:
        """Return the hash of all intervals; computed once, because planning uses the same boxes as keys many times."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.columns, self.turned))

    @classmethod
    def same(cls, box: Box, grid: tuple[int, int]) -> Boxes:
        """Return the same box for every rank of a grid."""
        return cls(((box.y0, box.y1),) * grid[0], ((box.x0, box.x1),) * grid[1])

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self.rows) * len(self.columns)

    @overload
    def __getitem__(self, rank: int) -> Box: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[Box]: ...

    def __getitem__(self, rank: int | slice) -> Box | Sequence[Box]:
        """Return the box of a rank.

        Raises:
            IndexError: there is no such rank.
        """
        if isinstance(rank, slice):
            return tuple(self[at] for at in range(len(self))[rank])
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {rank} of {len(self)}")
        row, column = divmod(rank, self.grid[1])
        y, x = (column, row) if self.turned else (row, column)
        return Box(*self.rows[y], *self.columns[x])

    def __iter__(self) -> Iterator[Box]:
        """Yield the box of each rank."""
        if self.turned:
            return (Box(*y, *x) for x in self.columns for y in self.rows)
        return (Box(*y, *x) for y in self.rows for x in self.columns)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows x columns of ranks."""
        return (len(self.columns), len(self.rows)) if self.turned else (len(self.rows), len(self.columns))

    @property
    def area(self) -> int:
        """Sum of the areas of all boxes."""
        return sum(map(length, self.rows)) * sum(map(length, self.columns))

    @property
    def largest(self) -> int:
        """Area of the largest box."""
        return max(map(length, self.rows)) * max(map(length, self.columns))

    def each(self, y: Callable[[int, int], Interval], x: Callable[[int, int], Interval]) -> Boxes:
        """Return the boxes with ``y`` applied to each interval along y, and ``x`` to each along x."""
        return Boxes(tuple(y(*row) for row in self.rows), tuple(x(*column) for column in self.columns), self.turned)

    def shift(self, dy: int, dx: int) -> Boxes:
        """Return the boxes moved by ``(dy, dx)``."""
        return self.each(lambda start, stop: (start + dy, stop + dy), lambda start, stop: (start + dx, stop + dx))

    def transposed(self) -> Boxes:
        """Return the boxes with y and x exchanged."""
        # With a single rank, turned and not turned are the same, and must compare equal.
        return Boxes(self.columns, self.rows, not self.turned and len(self) > 1)

    def within(self, box: Box) -> Boxes:
        """Return the intersections with one box."""
        return self.each(
            lambda start, stop: (max(start, box.y0), min(stop, box.y1)),
            lambda start, stop: (max(start, box.x0), min(stop, box.x1)),
        )

    def same_grid_as(self, other: Boxes) -> bool:
        """Whether both have the same rows and columns of ranks, e.g. not 2 x 2 ranks and strips of 1 x 4 ranks."""
        return self.grid == other.grid and self.turned == other.turned

    def hull(self, other: Boxes) -> Boxes:
        """Return boxes that cover those of both, which must have the same grid.

        Each is the smallest such box if no rank has an empty box. The interval along one axis of an empty box may have
        pixels, which count for all ranks of its row or column.
        """
        assert self.same_grid_as(other)
        rows = tuple(map(_hull, self.rows, other.rows))
        return Boxes(rows, tuple(map(_hull, self.columns, other.columns)), self.turned)

    def cover(self, need: Boxes, map_box: Box) -> bool:
        """Whether each rank's box contains the rank's box of ``need``, apart from pixels outside of ``map_box``."""
        needed_boxes = need.within(map_box)
        # Intervals of different grids do not correspond: boxes are compared rank by rank.
        if not self.same_grid_as(need):
            return all(has.contains(box) for has, box in zip(self, needed_boxes, strict=True))
        along_y = _needed_pairs(self.rows, needed_boxes.rows)
        along_x = _needed_pairs(self.columns, needed_boxes.columns)
        if not along_y or not along_x:  # all needed boxes are empty
            return True
        # Every row and every column with a need meet in some rank: it suffices to check rows and columns separately.
        return all(start <= first and last <= stop for (start, stop), (first, last) in (*along_y, *along_x))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (rank, intersection) of all ranks whose boxes meet ``box``, in rank order."""
        along_y = list(meeting(self.rows, (box.y0, box.y1)))
        along_x = list(meeting(self.columns, (box.x0, box.x1)))
        width = self.grid[1]
        if self.turned:  # the ranks of a row share their interval along x
            yield from ((row * width + column, Box(*y, *x)) for row, x in along_x for column, y in along_y)
        else:
            yield from ((row * width + column, Box(*y, *x)) for row, y in along_y for column, x in along_x)


def _needed_pairs(have: Sequence[Interval], need: Sequence[Interval]) -> list[tuple[Interval, Interval]]:
    """Return (interval of ``have``, interval of ``need``) for each index at which the second is not empty."""
    return [(has, needed) for has, needed in zip(have, need, strict=True) if length(needed)]


def length(interval: Interval) -> int:
    """Return the number of positions of an interval, 0 when empty."""
    return max(0, interval[1] - interval[0])


def _hull(a: Interval, b: Interval) -> Interval:
    if not length(a):
        return b
    return a if not length(b) else (min(a[0], b[0]), max(a[1], b[1]))


def meeting(intervals: Sequence[Interval], interval: Interval) -> Iterator[tuple[int, Interval]]:
    """Yield (index, intersection) of the intervals that meet one."""
    start, stop = interval
    for at, (first, last) in enumerate(intervals):
        common = (max(start, first), min(stop, last))
        if common[0] < common[1]:
            yield at, common
