"""Evaluation of slides by aggregators of stored features: positions and pictures are those of the slides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from data.store.slide_store import SlideStore
from data.tiles.features.bags import check_sides
from data.tiles.features.folder import open_features
from data.tiles.features.placed import check_slide, level0_corners, placed_tiles, tile_um
from data.tiles.features.source import FeatureTiles
from data.tiles.features.stored import StoredFeatures
from data.tiles.tissue_tiles import TissueTiles
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.tiles.source import TileSource
from pathology.predict.members import InputSpec, Member
from pathology.predict.options import PredictOptions
from pathology.predict.tiles.tile_ensemble import TileEnsemble


class FeatureEnsemble(TileEnsemble):
    """A `TileEnsemble` whose models take the vectors of ``options.features`` in place of pixels."""

    chunk = 4096
    needs_tissue = False

    def __init__(self, members: Sequence[Member], spec: InputSpec, comm: Communicator, options: PredictOptions) -> None:
        super().__init__(members, spec, comm, options)
        assert options.features is not None, "checked with the request"
        self._features = open_features(options.features)
        self._tile_um = members[0].config["features"]["tile_um"]

    def tiles_of(self, slide: SlideStore) -> TissueTiles:
        """Return the tiles of a slide's features.

        Raises:
            RequestError: The slide has no features, or these have another slide, another resolution or no positions.
        """
        stored = self._stored(slide)
        check_slide(stored, slide)
        side_um = tile_um(stored, slide)
        # The model's tiles had this side in training; None: unknown.
        if side_um is not None and self._tile_um is not None:
            check_sides({slide.slide_id: side_um}, float(self._tile_um))
        tiles = placed_tiles(stored, slide)
        if tiles is None:
            raise RequestError(
                f"{stored.path}: it has no positions (coords), which a heatmap needs; give the folder with h5_files, "
                f"or evaluate with `hyfi validate`"
            )
        return tiles

    def source_of(self, slide: SlideStore, tiles: TissueTiles) -> tuple[TileSource, torch.Tensor]:
        """Return the vectors of a slide, and a substitute for a vector that cannot be read."""
        stored = self._stored(slide)
        return FeatureTiles(stored, level0_corners(stored, slide)), torch.zeros(1, stored.features, 1, 1)

    def _stored(self, slide: SlideStore) -> StoredFeatures:
        if slide.slide_id not in self._features:
            raise RequestError(f"no features of slide {slide.slide_id}")
        return self._features[slide.slide_id]


def features_identity(files: Mapping[str, Path], slide_id: str) -> dict[str, int]:
    """Return size and time of the file of a slide's features; empty if there is none.

    Args:
        files: From `data.tiles.features.folder.feature_files`.
        slide_id: Name of the slide.
    """
    path = files.get(slide_id)
    if path is None:
        return {}
    try:
        status = (path / "zarr.json" if path.is_dir() else path).stat()
    except OSError:
        return {}
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
