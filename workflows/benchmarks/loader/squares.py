"""Squares of one slide, as the images of a decoding worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.samples.augment import Augment, Variation
from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box


@dataclass(frozen=True)
class Squares:
    """Squares of one slide, as the `Samples` of a decoding worker.

    Attributes:
        path: The slide in its store.
        boxes: The squares.
        augment: The augmentation of the squares; None: they stay as they are.
    """

    path: Path
    boxes: tuple[Box, ...]
    augment: Augment | None
    _open: list[SlideStore] = field(default_factory=list)

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        """Return the box of the original square that becomes ``box``."""
        variation = self._variation(index, epoch)
        return box if variation is None else variation.source(box)

    def read_plain(self, index: int, box: Box) -> npt.NDArray[np.uint8]:
        """Return a box of a square, (3, h, w)."""
        pixels = np.empty((3, *box.shape), np.uint8)
        self.read_plain_into(index, box, pixels)
        return pixels

    def read_plain_into(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        """Fill ``out``, (3, h, w), with a box of a square."""
        # Opened at the first read, so in the worker and not in the process that starts it.
        if not self._open:
            self._open.append(SlideStore.open(self.path))
        self._open[0].read(box.shift(self.boxes[index].y0, self.boxes[index].x0), out=out)

    def vary(self, index: int, epoch: int | None, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the augmented pixels."""
        variation = self._variation(index, epoch)
        return pixels if variation is None else variation.apply(pixels)

    def _variation(self, index: int, epoch: int | None) -> Variation | None:
        if self.augment is None:
            return None
        return self.augment.draw(0, epoch or 0, str(index), self.boxes[index].shape)
