"""Features as tiles: what was computed once by a frozen encoder, in place of pixels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from data.tiles.features.stored import StoredFeatures


class FeatureTiles:
    """The features of one slide; a :class:`hyfi_core.tiles.source.TileSource` of tiles ``(D, 1, 1)``. May be pickled.

    The encoder for it is ``torch.nn.Flatten()``.

    Args:
        stored: The slide's features.
        coords: Positions of tiles, for aggregators that take them; None: those of the file.
    """

    def __init__(self, stored: StoredFeatures, coords: NDArray[np.float64] | None = None) -> None:
        self.name, self.stored = stored.slide_id, stored
        self._coords = stored.coords() if coords is None else coords

    def __len__(self) -> int:
        """Return the number of tiles."""
        return self.stored.count

    @property
    def like(self) -> tuple[tuple[int, ...], torch.dtype]:
        """(shape, dtype) of a vector."""
        return (self.stored.features, 1, 1), torch.float32

    @property
    def coords(self) -> NDArray[np.float64] | None:
        """``(N, 2)`` float64: (y, x) of each tile's upper left corner, in `StoredFeatures.unit` or as given."""
        return self._coords

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return vectors as tiles, ``(n, D, 1, 1)`` float32 that the caller owns.

        Raises:
            RequestError: The file is damaged, or a value is not finite.
        """
        return torch.from_numpy(self.stored.vectors(indices))[:, :, None, None]
