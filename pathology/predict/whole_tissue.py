"""Evaluation of a network on all tissue of a slide, also if this is larger than the images of the training.

| if | then |
|---|---|
| the tissue fits into an image of the trained size | one image, as in training |
| the network takes images of any size | one larger image; each rank computes its part in cells |
| the network takes the trained size only | several images; logits are combined as the network pools: mean or max |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import hyfi_core
from data.samples.dataset import SlideDataset
from data.samples.view import View
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import MemoryLimitError, RequestError
from hyfi_core.plan.strategy import squarest
from hyfi_core.process_memory import return_what_is_freed
from hyfi_core.runtime.engine import Engine

CELL_PX = 2048
"""Side of the cells in which a rank computes its part of a larger image. Cells are larger if a rank's part of an image
of the trained size is larger."""

Pooling = Literal["mean", "max"]
ImageSize = tuple[int, int]


class SizedEngines:
    """The engines of one network for images of any size. Collective.

    It keeps the engine of the trained size, and the last engine of another size. Memory of a rank: its part of an image
    of the trained size, with activations; of a larger image, computed in cells, one cell with activations, and the maps
    that cells exchange.

    Args:
        module: The network, in evaluation mode; the engines share its weights.
        trained: Its engine for images of the trained size; None: it is made here.
        size_px: (height, width) of the images of the training.
        comm: Ranks among which images are divided.
        cells: Rows and columns of cells in which each rank computes its part of every image; ``auto``: as many as
            ``memory_bytes`` requires; None: as needed for large images.
        autocast: Type for autocast; None: no autocast.
        grid: Rows and columns of ranks; None: as square as possible.
        verify: Whether the capture at the trained size is verified; those at other sizes are not verified again.
        memory_bytes: Memory limit of a rank, with ``spill``; None: half of the free memory.
        spill: Where maps are spilled that no cell currently needs; None: they stay in memory.

    Raises:
        RequestError: The network cannot be evaluated at its trained size, or ``cells`` are used with several ranks
            whose messages have no tags (NCCL).
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Engine | None,
        size_px: ImageSize,
        comm: Communicator,
        cells: tuple[int, int] | Literal["auto"] | None = None,
        *,
        autocast: torch.dtype | None = None,
        grid: tuple[int, int] | None = None,
        verify: bool = False,
        memory_bytes: int | None = None,
        spill: str | None = None,
    ) -> None:
        if cells is not None and comm.size > 1 and comm.in_order:
            cells_text = cells if cells == "auto" else "{},{}".format(*cells)
            raise RequestError(
                f"--cells {cells_text} with {comm.size} GPUs for a slide: cells need messages with tags, "
                f"which NCCL does not have; use --ranks-per-slide 1, or no cells"
            )
        self._module, self._size, self._comm, self._cells = module.eval(), size_px, comm, cells
        self._autocast, self._grid = autocast, grid or squarest(comm.size)
        self._memory_bytes, self._spill = memory_bytes, spill
        self._trained = trained or self._make(size_px, verify)
        # The last engine of another size; until there is one, that of the trained size.
        self._latest: tuple[ImageSize, Engine] = (size_px, self._trained)
        # Whether the network supports other sizes than the trained one; None until another one is asked for.
        self._any_size: bool | None = None

    def at(self, size_px: ImageSize) -> Engine | None:
        """Return the engine for images of a size; None if the network does not support this size.

        Raises:
            MemoryLimitError: ``memory_bytes`` is too small for any number of cells.
        """
        if size_px == self._size:
            return self._trained
        if size_px != self._latest[0]:
            if self._any_size is False:
                return None
            try:
                # Keep only one other engine, because each has its own maps; slides of equal size often come together.
                self._latest = (size_px, self._make(size_px))
            except MemoryLimitError:
                raise  # the network takes this size
            except RequestError:
                self._any_size = False  # the error is the same on all ranks
                return None
            self._any_size = True
        return self._latest[1]

    def _make(self, size_px: ImageSize, verify: bool = False) -> Engine:
        """Return an engine for images of a size; larger ones than the trained size are computed in cells."""
        cells = self._cells or (None if size_px == self._size else self._cells_of(size_px))
        if cells is not None:
            return_what_is_freed()  # otherwise the heap keeps freed memory, as much again as a cell needs
        spill = None if cells is None else self._spill
        plan = hyfi_core.ParallelPlan(grids=(self._grid,), cells=cells, memory_bytes=self._memory_bytes, spill=spill)
        shape = (1, 3, *size_px)
        return hyfi_core.parallelize(self._module, shape, plan, self._comm, autocast=self._autocast, verify=verify)

    def _cells_of(self, size_px: ImageSize) -> tuple[int, int] | None:
        """Return (rows, columns) of cells of each rank's part of an image of another size; None if one cell is enough.

        Also None if messages have no tags, which cells need.
        """
        if self._comm.size > 1 and self._comm.in_order:
            return None
        rows, columns = (
            math.ceil(n / ranks / max(trained_px / ranks, CELL_PX))
            for n, trained_px, ranks in zip(size_px, self._size, self._grid, strict=True)
        )
        return (rows, columns) if rows * columns > 1 else None


def views_of(
    dataset: SlideDataset,
    index: int,
    engines: Sequence[SizedEngines],
    agree: Callable[[Callable[[], tuple[View, ...]]], tuple[View, ...]],
) -> tuple[View, ...]:
    """Return images of a slide with all its tissue, of sizes that all networks support. Collective.

    Args:
        dataset: Dataset of the trained size.
        index: Index of the slide.
        engines: Engines of all networks.
        agree: Calls its argument on all ranks, and raises on all if it raises on one.
    """
    # Prefer one larger image, which has no borders between images.
    larger = agree(lambda: dataset.whole_views(index, several=False))
    sizes = {view.size_px for view in larger}
    if all(engines_of.at(size) is not None for engines_of in engines for size in sizes):
        return larger
    return agree(lambda: dataset.whole_views(index, several=True))


def image_weights(logits: NDArray[np.float64], views: Sequence[View], pooling: Pooling) -> NDArray[np.float64]:
    """Return the weights (images, classes) with which the logits of images are summed to those of the slide.

    The weights of each class sum to 1.

    Args:
        logits: (images, classes).
        views: The images.
        pooling: ``mean``: weights are proportional to the tissue in an image. ``max``: the image with the largest logit
            of a class has weight 1.
    """
    if pooling == "max":
        # argmax takes the first of equals, so weights sum to 1.
        largest: NDArray[np.float64] = (np.arange(len(logits))[:, None] == logits.argmax(axis=0)).astype(np.float64)
        return largest
    # Mean pooling over a whole slide weighs all positions alike, so an image counts by its tissue.
    shown = np.array([view.coverage for view in views])
    fractions = shown / shown.sum() if shown.sum() > 0 else np.full(len(views), 1 / len(views))
    weights: NDArray[np.float64] = np.repeat(fractions[:, None], logits.shape[1], axis=1)
    return weights


def combination_text(views: Sequence[View], pooling: Pooling) -> str:
    """Return how the logits of several images are combined, as text; empty for one image."""
    if len(views) == 1:
        return ""
    how = "largest logit of each class" if pooling == "max" else "mean of the logits, weighted by tissue"
    return f"{how}, over {len(views)} images"
