"""Evaluating a network on all tissue of a slide, however large the images are that it was trained on.

```
the tissue fits the trained size     one image, as in training
the network takes any size           one larger image, cell by cell: memory stays that of a cell
the network needs its trained size   several images, whose logits are combined as the network pools: mean or maximum
```
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
from hyfi_core.errors import RequestError
from hyfi_core.plan.strategy import squarest
from hyfi_core.process_memory import return_what_is_freed
from hyfi_core.runtime.engine import Engine

CELL_PX = 2048
"""Sides of the cells in which one process computes images larger than those trained on, if these are smaller."""

Pooling = Literal["mean", "max"]
Size = tuple[int, int]


class SizedEngines:
    """One network on the ranks of a group, for images of any size. Collective.

    Kept are the engine of the trained size and the one made last. Memory: one image part (of a cell, where one process
    computes a larger image) and its activations; with several ranks, the image is divided among them.

    Args:
        module: in evaluation mode; the engines share its weights.
        trained: its engine for images of the trained size; None: one is made.
        size_px: (height, width) of the images that it was trained on.
        comm: the group.
        cells: rows and columns in which one process computes every image; None: as large images need it.
        autocast: computes in this type where autocast would.
        grid: rows and columns of ranks; None: as square as they can be.

    Raises:
        RequestError: the network cannot be evaluated at its trained size, or cells are asked for with several ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: Engine | None,
        size_px: Size,
        comm: Communicator,
        cells: tuple[int, int] | None = None,
        *,
        autocast: torch.dtype | None = None,
        grid: tuple[int, int] | None = None,
    ) -> None:
        if cells is not None and comm.size > 1:
            raise RequestError(
                f"cells {cells[0]},{cells[1]} with {comm.size} ranks: cells need one rank for each slide; use one "
                f"rank, --ranks-per-slide 1, or no cells"
            )
        self._module, self._size, self._comm, self._cells = module.eval(), size_px, comm, cells
        self._autocast, self._grid = autocast, grid or squarest(comm.size)
        self._trained = trained or self._make(size_px)
        self._latest: tuple[Size, Engine] = (size_px, self._trained)
        self._any_size: bool | None = None

    def at(self, size_px: Size) -> Engine | None:
        """Return the engine for images of a size; None where the network cannot be evaluated at it."""
        if size_px == self._size:
            return self._trained
        if size_px != self._latest[0]:
            if self._any_size is False:
                return None
            try:
                self._latest = (size_px, self._make(size_px))
            except RequestError:
                self._any_size = False  # all ranks are refused alike
                return None
            self._any_size = True
        return self._latest[1]

    def _make(self, size_px: Size) -> Engine:
        shape = (1, 3, *size_px)
        cells = self._cells
        if cells is None and self._comm.size == 1 and size_px != self._size:
            rows, columns = (math.ceil(n / max(known, CELL_PX)) for n, known in zip(size_px, self._size, strict=True))
            cells = (rows, columns) if rows * columns > 1 else None
        if cells is not None:
            return_what_is_freed()  # else the heap keeps as much again as a cell needs
            plan = hyfi_core.ParallelPlan(grids=((1, 1),), cells=cells)
        else:
            plan = hyfi_core.ParallelPlan(grids=(self._grid,))
        return hyfi_core.parallelize(self._module, shape, plan, self._comm, autocast=self._autocast)


def views_of(
    dataset: SlideDataset,
    index: int,
    engines: Sequence[SizedEngines],
    agreed: Callable[[Callable[[], tuple[View, ...]]], tuple[View, ...]],
) -> tuple[View, ...]:
    """Return the images in which all tissue of a slide is shown to networks that must all take them. Collective.

    Args:
        dataset: of the trained size.
        index: the slide.
        engines: of the networks.
        agreed: runs its argument on all ranks; fails on all where it fails on one.
    """
    larger = agreed(lambda: dataset.whole_views(index, several=False))
    sizes = {view.size_px for view in larger}
    if all(one.at(size) is not None for one in engines for size in sizes):
        return larger
    return agreed(lambda: dataset.whole_views(index, several=True))


def evidence(logits: NDArray[np.float64], views: Sequence[View], pooling: Pooling) -> NDArray[np.float64]:
    """Return the weight of each image's logit in the slide's, (images, classes); each class's weights sum to 1.

    Args:
        logits: (images, classes).
        views: the images.
        pooling: ``mean``: images weigh what they show of the tissue. ``max``: the largest logit of each class counts.
    """
    if pooling == "max":
        largest: NDArray[np.float64] = (np.arange(len(logits))[:, None] == logits.argmax(axis=0)).astype(np.float64)
        return largest
    shown = np.array([view.coverage for view in views])
    shares = shown / shown.sum() if shown.sum() > 0 else np.full(len(views), 1 / len(views))
    weights: NDArray[np.float64] = np.repeat(shares[:, None], logits.shape[1], axis=1)
    return weights


def combined_words(views: Sequence[View], pooling: Pooling) -> str:
    """Return how the images' evidence is combined, for people; empty for one image."""
    if len(views) == 1:
        return ""
    how = "largest logit of each class" if pooling == "max" else "mean of the logits, weighted by tissue"
    return f"{how}, over {len(views)} images"
