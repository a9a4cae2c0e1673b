"""Features in zarr 3: this project's own format.

::

    <slide_id>.zarr/   attributes `hyfi_features`: slide, encoder, size of tiles …
        features       (N, D) float32
        coords         (N, 2) int64: (y, x) of each tile's upper left corner in level-0 pixels of the slide
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workflows.features.tiled_slide import TiledSlide

FORMAT = 1
"""Version of the attributes."""
_CHUNK_BYTES = 2**22


class ZarrFeatures:
    """A group of features that is being written; each chunk has a checksum (CRC-32C).

    Memory: a chunk of 4 MB.

    Args:
        path: The group's folder.
        slide: The slide and its tiles.
        features: Length of a vector.
    """

    def __init__(self, path: Path, slide: TiledSlide, features: int) -> None:
        import zarr  # here, because it takes a quarter of a second, which other formats need not wait for
        from zarr.codecs import Crc32cCodec

        count = len(slide)
        # 4 bytes a number.
        self._chunk_rows = max(1, min(count, _CHUNK_BYTES // (4 * features)))
        group = zarr.open_group(path, mode="w", zarr_format=3, attributes={"hyfi_features": _attributes(slide)})
        checksum = Crc32cCodec()
        shape, chunks = (count, features), (self._chunk_rows, features)
        self._vectors = group.create_array(
            "features", shape=shape, chunks=chunks, dtype="float32", compressors=[checksum]
        )
        coords = group.create_array(
            "coords", shape=(count, 2), chunks=(count, 2), dtype="int64", compressors=[checksum]
        )
        coords[:] = slide.coords
        self._buffer, self._first, self._used = np.empty(chunks, np.float32), 0, 0

    def write(self, start: int, vectors: NDArray[np.float32]) -> None:
        """Write the vectors ``(n, D)`` of tiles ``start`` and following, which must be the next ones."""
        if start != self._first + self._used:
            raise ValueError(f"expected tile {self._first + self._used}, given {start}")
        while len(vectors):
            fitting = vectors[: self._chunk_rows - self._used]  # as many as the chunk has room for
            self._buffer[self._used : self._used + len(fitting)] = fitting
            self._used, vectors = self._used + len(fitting), vectors[len(fitting) :]
            # Only whole chunks: a chunk written in two parts would be read and encoded again.
            if self._used == self._chunk_rows:
                self._flush()

    def close(self) -> None:
        """Write the last, partly filled chunk."""
        self._flush()

    def _flush(self) -> None:
        """Write the vectors that are in the buffer, which is empty then."""
        if self._used:
            self._vectors[self._first : self._first + self._used] = self._buffer[: self._used]
            self._first, self._used = self._first + self._used, 0


def _attributes(slide: TiledSlide) -> dict[str, Any]:
    """Return the attributes of the group: whose tiles these are, and where."""
    return {
        "format": FORMAT,
        "slide_id": slide.slide_id,
        "encoder": slide.encoder,
        "coords": "(y, x) of the upper left corner, in level-0 pixels of the slide",
        "size_px": slide.size_px,
        "stride_px": slide.stride_px,
        "mpp": slide.mpp_um,
        "source_size_px": list(slide.source_size_px),
        "source_mpp": list(slide.source_mpp_um),
        "tile_source_px": list(slide.tile_source_px),
    }
