"""Images in memory, without torch: child processes import this module."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

from hyfi_core.plan.box import Box

HEIGHT, WIDTH = 37, 53

Pixels = npt.NDArray[np.uint8]


class Images:
    """Images whose pixels say which sample, epoch and place they are; counts what is read."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.reads: list[tuple[int, Box]] = []
        self._delay_s = delay_s
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {"reads": [], "_delay_s": self._delay_s}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        return box if epoch is None or epoch % 2 else Box(HEIGHT - box.y1, HEIGHT - box.y0, box.x0, box.x1)

    def read_plain(self, index: int, box: Box) -> Pixels:
        time.sleep(self._delay_s)
        with self._lock:
            self.reads.append((index, box))
        rows, columns = box.slices()
        return np.random.default_rng(index).integers(0, 256, (3, HEIGHT, WIDTH), np.uint8)[:, rows, columns]

    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        if epoch is None:
            return pixels
        return (pixels if epoch % 2 else pixels[:, ::-1]) ^ np.uint8(hash((index, epoch)) % 256)

    def read(self, index: int, box: Box, epoch: int | None = None) -> Pixels:
        return self.vary(index, epoch, self.read_plain(index, self.source(index, box, epoch)))


class BrokenImages(Images):
    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        if epoch == 1:
            raise OSError("chunk c/0/1/2 cannot be decoded")
        return super().vary(index, epoch, pixels)
