"""Features of a slide, gathered on all ranks that share it.

Each rank sends its part to every other as soon as it is complete, while the next slide is being encoded.
"""

from __future__ import annotations

import torch

from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.tiles.chunks import SlideParts

_TAGS = 1024


class SlideFeatures:
    """The features of one slide on this rank.

    Args:
        parts: how ranks share tiles.
        slide: number of the slide in the batch.
        comm: the ranks that share it.
        width: length of a feature vector.
        dtype: dtype of features.
        device: device of features.
    """

    def __init__(
        self, parts: SlideParts, slide: int, comm: Communicator, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts, self._slide, self._comm = parts, slide, comm
        self._all = torch.empty((parts.tiles[slide], width), dtype=dtype, device=device)
        # A tensor of its own, because memory that is being sent must not be part of memory that is being received.
        self._own = self._all.new_empty((len(self.own), width)) if comm.size > 1 else self._all
        self._missing = len(self.own)  # tiles of this rank whose features are not stored yet
        self._pending: Pending | None = None  # the exchange, once it is started

    @property
    def own(self) -> range:
        """The tiles that this rank encodes."""
        return self._parts.part(self._slide, self._comm.rank)

    def put(self, first: int, features: torch.Tensor) -> None:
        """Store the features of consecutive tiles of this rank."""
        first -= self.own.start
        # Detached, so that the graph of a chunk lives only as long as the pass keeps it.
        self._own[first : first + len(features)].copy_(features.detach())
        self._missing -= len(features)

    def start(self) -> None:
        """Start the exchange if this rank's part is complete; ranks start the exchanges of slides in the same order."""
        if self._pending is not None or self._missing or self._comm.size == 1:
            return
        peers = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        parts = {rank: self._parts.part(self._slide, rank) for rank in peers}
        # Several exchanges may be under way at once. They start in the same order on all ranks, so tags may repeat.
        tag = self._slide % _TAGS
        receives = [Message(r, self._all[p.start : p.stop], tag) for r, p in parts.items() if len(p)]
        sends = [Message(rank, self._own, tag) for rank in peers] if len(self._own) else []
        self._pending = self._comm.exchange(sends, receives)

    def gathered(self) -> torch.Tensor:
        """Wait for the features of all ranks and return them, ``(N, D)``."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self._all[self.own.start : self.own.stop].copy_(self._own)
            self._own = self._all
        return self._all
