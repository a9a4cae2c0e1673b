"""Half-open rectangles in the coordinates of a whole feature map."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The rectangle ``[y0, y1) x [x0, x1)``; empty if an end is not after its start.

    Coordinates are those of the whole map, never of a part, and may be outside of it: a window that includes padding is
    a box with negative starts.
    """

    y0: int
    y1: int
    x0: int
    x1: int

    @classmethod
    def of_size(cls, height: int, width: int) -> Box:
        """Return the box of a whole map of this size."""
        return cls(0, height, 0, width)

    @property
    def height(self) -> int:
        """Rows, 0 when empty."""
        return max(0, self.y1 - self.y0)

    @property
    def width(self) -> int:
        """Columns, 0 when empty."""
        return max(0, self.x1 - self.x0)

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    @property
    def area(self) -> int:
        """Number of pixels."""
        return self.height * self.width

    @property
    def empty(self) -> bool:
        """Whether it has no pixels."""
        return self.y1 <= self.y0 or self.x1 <= self.x0

    def intersect(self, other: Box) -> Box:
        """Return the intersection; if the boxes do not meet, an empty box, whose ends may be before its starts."""
        return Box(max(self.y0, other.y0), min(self.y1, other.y1), max(self.x0, other.x0), min(self.x1, other.x1))

    def hull(self, other: Box) -> Box:
        """Return the smallest box that covers both; an empty box adds nothing."""
        if self.empty:
            return other
        if other.empty:
            return self
        return Box(min(self.y0, other.y0), max(self.y1, other.y1), min(self.x0, other.x0), max(self.x1, other.x1))

    def contains(self, other: Box) -> bool:
        """Whether every pixel of ``other`` is in this box (an empty box is in any)."""
        return other.empty or (
            self.y0 <= other.y0 and other.y1 <= self.y1 and self.x0 <= other.x0 and other.x1 <= self.x1
        )

    def shift(self, dy: int, dx: int) -> Box:
        """Return the box moved by ``(dy, dx)``."""
        return Box(self.y0 + dy, self.y1 + dy, self.x0 + dx, self.x1 + dx)

    def relative_to(self, origin: Box) -> Box:
        """Return the same pixels counted from the first pixel of ``origin``."""
        return self.shift(-origin.y0, -origin.x0)

    def slices(self) -> tuple[slice, slice]:
        """Return (rows, columns) for indexing an array that starts at pixel (0, 0)."""
        return slice(self.y0, self.y1), slice(self.x0, self.x1)


def hull(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that covers all of ``boxes``; ``Box(0, 0, 0, 0)`` for none."""
    result = Box(0, 0, 0, 0)
    for box in boxes:
        result = result.hull(box)
    return result
