"""What one rank, or one cell of it, reads of a batch of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyfi_core.plan.box import Box


@dataclass(frozen=True, slots=True)
class InputPart:
    """A box of consecutive images of a batch.

    Attributes:
        box: the box that is read of each image, halo included, within the image.
        first: the first sample.
        stop: the sample after the last.
    """

    box: Box
    first: int
    stop: int

    def has_sample(self, position: int) -> bool:
        """Whether the part has the sample at this index of the batch."""
        return self.first <= position < self.stop

    def covers(self, box: Box, first: int, stop: int) -> bool:
        """Whether the part contains ``box`` of the samples ``[first, stop)``."""
        return self.box.contains(box) and self.first <= first and stop <= self.stop

    def microbatch(self, start: int, size: int) -> InputPart:
        """Return the same box of ``size`` samples, from the part's sample ``start`` on."""
        return InputPart(self.box, self.first + start, self.first + start + size)

    def to_json(self) -> list[int]:
        """Return [y0, y1, x0, x1, first, stop]."""
        return [self.box.y0, self.box.y1, self.box.x0, self.box.x1, self.first, self.stop]

    @classmethod
    def from_json(cls, value: Sequence[int]) -> InputPart:
        """Return the part from the result of ``to_json``."""
        return cls(Box(*value[:4]), value[4], value[5])
