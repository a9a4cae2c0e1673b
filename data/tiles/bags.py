"""Slides of a dataset as bags of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from data.samples.augment import Augment
from data.samples.coverage import MAX_LISTED
from data.samples.dataset import SlideDataset, SlideRef
from data.store.slide_store import SlideStore
from data.tiles.reader import StoreTiles
from data.tiles.recent import Recent
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import NoTilesError, TissueTiles, tissue_tiles
from hyfi_core.errors import RequestError

_ALL_TILES_BYTES = 2**26
"""Bytes of tiles' positions that stay in memory."""


class BagSource(Protocol):
    """The tiles of one slide, as pixels or vectors; see `hyfi_core.tiles.source.TileSource`."""

    name: str

    @property
    def coords(self) -> NDArray[Any] | None:
        """Return positions ``(N, 2)``; None if unknown."""
        ...

    def __len__(self) -> int:
        """Return the number of tiles."""
        ...

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return some tiles."""
        ...


class Bags(Protocol):
    """The slides of a dataset as bags: of tiles (`TileBags`), of stored features (`FeatureBags`), or of a whole case.

    Attributes:
        dataset: The slides.
        samples: One for each bag, with its label.
    """

    @property
    def dataset(self) -> SlideDataset:
        """Return the slides."""
        ...

    @property
    def samples(self) -> tuple[SlideRef, ...]:
        """Return one slide for each bag, with its label."""
        ...

    def __len__(self) -> int:
        """Return the number of bags."""
        ...

    def count(self, index: int) -> int:
        """Return the number of tiles of a slide in an epoch of training."""
        ...

    def coverage(self, index: int) -> float | None:
        """Return the share of a slide's tissue that is in its tiles; None if unknown."""
        ...

    def of(self, index: int, epoch: int | None = None) -> BagSource:
        """Return the tiles of a slide: in an epoch of training, or all of them."""
        ...

    def check(self) -> list[dict[str, Any]]:
        """Return a row of ``coverage.csv`` for each slide; refuse slides that cannot be used."""
        ...


class TileBags:
    """The tiles of each slide of a dataset. A slide is read when it is first used.

    Args:
        dataset: The slides.
        tiling: Size, distance and resolution of tiles.
        most: Largest number of tiles of a slide in an epoch, drawn by (seed, epoch, slide); None: all.
        augment: Ranges of the augmentation of each tile; None: none.
    """

    def __init__(
        self, dataset: SlideDataset, tiling: Tiling, most: int | None = None, augment: Augment | None = None
    ) -> None:
        self.dataset, self.tiling = dataset, tiling
        self._most, self._augment = most, augment
        self._all_tiles = Recent(_ALL_TILES_BYTES, _bytes_of)

    @property
    def samples(self) -> tuple[SlideRef, ...]:
        """The slides."""
        return self.dataset.samples

    def __len__(self) -> int:
        """Return the number of slides."""
        return len(self.dataset)

    def slide(self, index: int) -> SlideStore:
        """Return the open slide."""
        slide = self.dataset.slide(index)
        assert isinstance(slide, SlideStore), "tiles are read from stores"
        return slide

    def all_tiles(self, index: int) -> TissueTiles:
        """Return all tissue tiles of a slide.

        Raises:
            RequestError: The slide is coarser than the tiles, or has no tile with enough tissue.
        """
        return self._all_tiles.get(index, lambda: tissue_tiles(self.slide(index), self.tiling))

    def count(self, index: int) -> int:
        """Return the number of tiles of a slide in an epoch of training."""
        count = len(self.all_tiles(index))
        return count if self._most is None else min(self._most, count)

    def coverage(self, index: int) -> float:
        """Return the share of a slide's tissue that is in its tiles."""
        return tissue_seen(*self.slide(index).tissue(), self.all_tiles(index))[0]

    def of(self, index: int, epoch: int | None = None) -> StoreTiles:
        """Return the tiles of a slide.

        Args:
            index: Index of the slide.
            epoch: Epoch of training, for which tiles are drawn and augmented; None: all tiles, not augmented.
        """
        slide, all_tiles, colours = self.slide(index), self.all_tiles(index), self.dataset.colour_map(index)
        if epoch is None:
            return StoreTiles(slide, all_tiles, colours=colours)
        seed, drawn = self.dataset.seed, all_tiles.drawn(self._most, self.dataset.seed, epoch)
        return StoreTiles(slide, drawn, colours=colours, augment=self._augment, seed=seed, epoch=epoch)

    def check(self) -> list[dict[str, Any]]:
        """Return a row of ``coverage.csv`` for each slide: the share of its tissue in tiles, and their number.

        Raises:
            RequestError: Slides have no tile with enough tissue; the message names them, and what would work.
        """
        rows, empty = [], []
        for index, sample in enumerate(self.dataset.samples):
            try:
                tiles = self.all_tiles(index)
            except NoTilesError as error:
                empty.append(str(error))
                continue
            rows.append(self._row(sample.slide_id, sample.case_id, index, tiles))
        if empty:
            raise RequestError(_describe(empty))
        return rows

    def _row(self, slide_id: str, case_id: str, index: int, tiles: TissueTiles) -> dict[str, Any]:
        """Return a slide's row of the coverage table."""
        coverage, tissue_px = tissue_seen(*self.slide(index).tissue(), tiles)
        return {
            "slide_id": slide_id,
            "case_id": case_id,
            "coverage": coverage,
            "tissue_px": tissue_px,
            "flags": "",
            "pieces": len(tiles),
            "fits_size_px": None,
            "fits_mpp": None,
        }


def tissue_seen(mask: NDArray[np.bool_], mask_mpp: tuple[float, float], tiles: TissueTiles) -> tuple[float, int]:
    """Return (share of a slide's tissue that lies in ``tiles``, area of all of its tissue in pixels of the tiles).

    Args:
        mask: The slide's tissue ``(h, w)``.
        mask_mpp: Microns per pixel (y, x) of the mask.
        tiles: The tiles.
    """
    scale = [mpp / coarse for mpp, coarse in zip(tiles.plane.mpp, mask_mpp, strict=True)]
    # Mask pixels whose centres a tile covers: from ⌊y + ½⌋ to ⌊end + ½⌋, so that neighbouring tiles share none.
    # `clip`: tiles of other tools may begin outside the stored slide, and a negative index would count from its end.
    starts = np.floor(tiles.corners * scale + 0.5).astype(int).clip(0)
    ends = np.floor((tiles.corners + tiles.size_px) * scale + 0.5).astype(int).clip(0)
    covered = np.zeros(mask.shape, bool)
    for (y0, x0), (y1, x1) in zip(starts.tolist(), ends.tolist(), strict=True):
        # Set, not added: tiles may overlap.
        covered[y0:y1, x0:x1] = True
    total = int(mask.sum())
    tissue_px = round(total * float(np.prod(mask_mpp)) / float(np.prod(tiles.plane.mpp)))
    return int((mask & covered).sum()) / total if total else 0.0, tissue_px


def _describe(empty: Sequence[str]) -> str:
    """Return the message about slides without tiles."""
    lines = [f"  {line}" for line in empty[:MAX_LISTED]]
    lines += [f"  … and {len(empty) - MAX_LISTED} more"] if len(empty) > MAX_LISTED else []
    return (
        f"data.tiles: {len(empty)} slide{'s have' if len(empty) > 1 else ' has'} no tile with enough tissue:\n"
        + "\n".join(lines)
        + "\nTrain with a smaller data.tiles.min_tissue or size_px, or leave these slides out of the splits"
    )


def _bytes_of(tiles: TissueTiles) -> int:
    return tiles.corners.nbytes + tiles.tissue.nbytes
