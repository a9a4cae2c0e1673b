"""Features in HDF5, as TRIDENT, CLAM and STAMP write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.tiles.features.stored import import_h5py
from workflows.features.errors import FeatureError
from workflows.features.tiled_slide import TiledSlide

STAMP_VERSION = "2.1.0"
"""The version of STAMP whose attributes are written; STAMP refuses files of a version newer than itself."""
_CHUNK_BYTES = 2**19
"""Smaller than HDF5's cache of 1 MiB: a chunk that is written in parts must stay in the cache."""


class Hdf5Features:
    """A file of features that is being written; each chunk has a checksum (Fletcher 32), which HDF5 checks itself.

    Args:
        path: The file.
        slide: The slide and its tiles.
        features: Length of a vector.
        stamp: Whether to write the format of STAMP; otherwise that of TRIDENT and CLAM.
    """

    def __init__(self, path: Path, slide: TiledSlide, features: int, stamp: bool) -> None:
        self._file = import_h5py().File(path, "w")
        self._slide, self._dtype = slide, np.dtype(np.float16 if stamp else np.float32)
        # The names and positions that STAMP expects; otherwise those of TRIDENT.
        name, coords = ("feats", _stamp_coords(slide)) if stamp else ("features", _corners(slide))
        count = len(slide)
        # At least one row, and no chunk larger than the data.
        rows = max(1, min(count, _CHUNK_BYTES // (features * self._dtype.itemsize)))
        self._vectors = self._file.create_dataset(
            name, (count, features), self._dtype, chunks=(rows, features), fletcher32=True
        )
        positions = self._file.create_dataset("coords", data=coords, chunks=(count, 2), fletcher32=True)
        if stamp:
            self._file.attrs.update(_stamp_attributes(slide))
        else:
            positions.attrs.update(trident_attributes(slide))
            self._vectors.attrs.update({"name": slide.slide_id, "encoder": slide.encoder})

    def write(self, start: int, vectors: NDArray[np.float32]) -> None:
        """Write the vectors ``(n, D)`` of tiles ``start`` and following.

        Raises:
            FeatureError: A value is too large for the file's type.
        """
        with np.errstate(over="ignore"):
            # Beyond 65504, float16 is infinite: found below, with a message instead of NumPy's warning.
            cast = vectors.astype(self._dtype, copy=False)
        if not np.isfinite(cast).all():
            raise FeatureError(
                f"features up to {np.abs(vectors).max():g} do not fit into float16, which STAMP reads; use another "
                f"--format"
            )
        self._vectors[start : start + len(cast)] = cast

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def trident_attributes(slide: TiledSlide) -> dict[str, Any]:
    """Return the attributes of ``coords`` by which TRIDENT finds tiles in the slide."""
    return {
        "patch_size": slide.size_px,
        "patch_size_level0": round(sum(slide.tile_source_px) / 2),
        "level0_magnification": _number(slide.magnification),
        "target_magnification": _number(slide.tile_magnification),
        "overlap": max(0, slide.size_px - slide.stride_px),
        "name": slide.slide_id,
        "level0_width": slide.source_size_px[1],
        "level0_height": slide.source_size_px[0],
    }


def _corners(slide: TiledSlide) -> NDArray[np.int64]:
    """Return ``(N, 2)``: (x, y) of the upper left corners in level-0 pixels."""
    return np.ascontiguousarray(slide.coords[:, ::-1])


def _stamp_coords(slide: TiledSlide) -> NDArray[np.float32]:
    """Return ``(N, 2)``: (x, y) of the upper left corners in micrometres."""
    coords: NDArray[np.float32] = (slide.corners[:, ::-1] * np.array(slide.source_mpp_um[::-1])).astype(np.float32)
    return coords


def _stamp_attributes(slide: TiledSlide) -> dict[str, Any]:
    """Return the attributes by which STAMP reads the file."""
    return {
        "stamp_version": STAMP_VERSION,
        "extractor": slide.encoder,
        "unit": "um",
        "tile_size_um": slide.size_px * slide.mpp_um,
        "tile_size_px": slide.size_px,
        "code_hash": "hyfi",
        "feat_type": "tile",
    }


def _number(value: float) -> int | float:
    """Return a whole number as an integer, as TRIDENT writes magnifications: 20, not 20.0."""
    return int(value) if value.is_integer() else value
