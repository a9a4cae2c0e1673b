"""All tiles of all slides of a case as one bag."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.samples.dataset import SlideDataset, SlideRef
from data.tiles.bags import Bags, BagSource
from data.tiles.grouping import Grouping
from hyfi_core.tiles.source import tile_like

_APART_PX = 100_000
"""Distance between the slides of a case in the positions of tiles, in level-0 pixels."""


class JoinedTiles:
    """The tiles of several slides, one slide after the other; a `hyfi_core.tiles.source.TileSource`.

    Memory: only the slide that was read last keeps data between reads, such as decoded chunks. In positions, the slides
    are side by side with a gap, so that tiles of different slides are never neighbours:

    ::

        first slide             second slide
        +--+--+--+              +--+--+
        |  |  |  |  _APART_PX   |  |  |
        +--+--+--+              +--+--+

    Args:
        name: For messages.
        parts: The tiles of each slide.
    """

    def __init__(self, name: str, parts: Sequence[BagSource]) -> None:
        self.name, self._parts = name, tuple(parts)
        self._ends = [*accumulate(map(len, parts))]
        self._keeping: int | None = None  # the slide that was read last

    def __len__(self) -> int:
        """Return the number of tiles of all slides."""
        return self._ends[-1]

    @property
    def like(self) -> tuple[tuple[int, ...], torch.dtype]:
        """(shape, dtype) of a tile."""
        return tile_like(self._parts[0])

    @property
    def kept_bytes(self) -> int:
        """Most bytes that stay in memory between reads, until `forget` is called."""
        return max(int(getattr(part, "kept_bytes", 0)) for part in self._parts)

    def forget(self) -> None:
        """Free what stays in memory."""
        forget = None if self._keeping is None else getattr(self._parts[self._keeping], "forget", None)
        if forget is not None:
            forget()
        self._keeping = None

    @cached_property
    def identity(self) -> str:
        """Text that differs whenever a tile differs; empty if a slide's identity is empty."""
        own = [str(getattr(part, "identity", "")) for part in self._parts]
        return " | ".join(own) if all(own) else ""

    @cached_property
    def coords(self) -> NDArray[Any] | None:
        """``(N, 2)``: (y, x) of each tile, with the slides side by side; None if a slide has no positions."""
        shifted, left = [], 0
        for part in self._parts:
            if part.coords is None:
                return None
            coords = np.asarray(part.coords)
            low, high = coords[:, 1].min(), coords[:, 1].max()
            shifted.append(coords + np.array([0, left - low], coords.dtype))
            left += high - low + _APART_PX
        return np.concatenate(shifted)

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return some tiles, in the order of ``indices``, as their slides return them."""
        # `bisect_right`: the end of a slide is the index of the next slide's first tile.
        slides = [bisect_right(self._ends, index) for index in indices]
        starts = [0, *self._ends]
        read: dict[int, torch.Tensor] = {}
        # Slide by slide, whatever the order of the indices, because each change of slides frees decoded chunks.
        for slide in dict.fromkeys(slides):
            if slide != self._keeping:
                self.forget()
                self._keeping = slide
            own = [k for k, one in enumerate(slides) if one == slide]
            tiles = self._parts[slide].read([indices[k] - starts[slide] for k in own])
            read |= dict(zip(own, tiles, strict=True))
        return torch.stack([read[k] for k in range(len(indices))])

    def span(self, part: int) -> slice:
        """Return the indices of the tiles of one slide."""
        # `_ends` are cumulative: the slide's own length leads back to its start.
        return slice(self._ends[part] - len(self._parts[part]), self._ends[part])


class CaseBags:
    """The cases of a dataset as bags: index k is the k-th case. See `data.tiles.bags.Bags`.

    Args:
        slides: The slides as bags.
        cases: Which slides each case has.
    """

    def __init__(self, slides: Bags, cases: Grouping) -> None:
        self.slides, self.cases = slides, cases

    @property
    def dataset(self) -> SlideDataset:
        """The slides."""
        return self.slides.dataset

    @property
    def samples(self) -> tuple[SlideRef, ...]:
        """The first slide of each case, with the label of the case."""
        return self.cases.samples

    def __len__(self) -> int:
        """Return the number of cases."""
        return len(self.cases)

    def count(self, index: int) -> int:
        """Return the number of tiles of a case in an epoch of training."""
        return sum(map(self.slides.count, self.cases.members[index]))

    def coverage(self, index: int) -> float | None:
        """Return the mean of the `coverage` of a case's slides; None if one of them is unknown."""
        shares = [self.slides.coverage(slide) for slide in self.cases.members[index]]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if len(known) == len(shares) else None

    def of(self, index: int, epoch: int | None = None) -> BagSource:
        """Return the tiles of a case: in an epoch of training, or all of them."""
        parts = [self.slides.of(slide, epoch) for slide in self.cases.members[index]]
        return parts[0] if len(parts) == 1 else JoinedTiles(f"case {self.samples[index].case_id}", parts)

    def check(self) -> list[dict[str, Any]]:
        """Return the rows of ``coverage.csv``, one for each slide; see `Bags`."""
        return self.slides.check()


def grouped(bags: Bags, groups: Grouping) -> Bags:
    """Return slides as samples of a run: as they are, if each is a sample of its own."""
    return bags if all(len(one) == 1 for one in groups.members) else CaseBags(bags, groups)
