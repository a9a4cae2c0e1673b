"""Open slides of the viewer: RGB pixels of a store or a slide file, and their coordinates.

Two coordinate systems are used:

- shown pixels: pixels of the finest level of what is shown, the store or the file;
- level 0: pixels of the file's finest level, from the corner of the slide's bounds, as in QuPath. Regions and
  annotations are stored in these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data.location import is_remote
from data.store.slide_store import SlideStore, StoreError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.identity import SourceStamp
from pathology.ingest.thumbnail import thumbnail_of_source
from pathology.predict.table import SOURCE_FILE
from pathology.readers.facts.pictures import WHOLE, Pick
from pathology.readers.mpp import resolve_mpp
from pathology.readers.source_level import RGB, BadTile
from pathology.readers.sources import open_source
from pathology.tissue.outlines import SlideGrid

STORE_BLOCK_PX = 512
LARGEST_BLOCK_PX = 1024
_DAMAGE = (np.array([214, 40, 120], np.uint8), np.array([255, 255, 255], np.uint8))
_DAMAGE_STRIPE_PX = 12


@dataclass(frozen=True, slots=True)
class ShownLevel:
    """One level of a shown slide.

    Attributes:
        height_px: Rows.
        width_px: Columns.
        downsample: Shown pixels for each pixel of the level, (y, x).
        block_px: (height, width) of the blocks that are read and cached.
    """

    height_px: int
    width_px: int
    downsample: tuple[float, float]
    block_px: tuple[int, int]


@dataclass(frozen=True)
class TissueMask:
    """A tissue mask.

    Attributes:
        mask: ``(h, w)`` bool, from the slide's upper left corner.
        pixel_px: Shown pixels for each pixel of the mask, (y, x).
    """

    mask: NDArray[np.bool_]
    pixel_px: tuple[float, float]


class ShownSlide(Protocol):
    """An open slide; safe to read from several threads.

    Attributes:
        levels: Finest first.
        mpp: Micrometres per shown pixel, (y, x); None if unknown.
        to_level0: Map between shown pixels and level 0.
        facts: Properties for display, as (name, text).
    """

    levels: tuple[ShownLevel, ...]
    mpp: tuple[float, float] | None
    to_level0: SlideGrid
    facts: tuple[tuple[str, str], ...]

    def source_file(self) -> Mapping[str, Any]:
        """Return what is known of the slide's file, as in ``prediction.json``: ``sha256``, ``size_bytes``."""

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)`` uint8 of a box inside a level; damaged tiles are striped, not white."""

    def tissue(self) -> TissueMask | None:
        """Return the tissue mask; None if unknown."""

    def close(self) -> None:
        """Close the file."""


class StoredPixels:
    """A slide of a store.

    Args:
        path: ``STORE/<slide_id>.zarr``.

    Raises:
        StoreError: The slide is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._slide = slide = SlideStore.open(path)
        finest = slide.levels[0]
        self.mpp: tuple[float, float] | None = finest.mpp
        self.levels = tuple(
            ShownLevel(
                v.height_px,
                v.width_px,
                (v.mpp[0] / finest.mpp[0], v.mpp[1] / finest.mpp[1]),
                (STORE_BLOCK_PX, STORE_BLOCK_PX),
            )
            for v in slide.levels
        )
        self.to_level0 = _grid_of_store(slide)
        self.facts = _facts_of_store(slide)

    def source_file(self) -> Mapping[str, Any]:
        """See `ShownSlide`."""
        return {name: self._slide.attributes.get(name) for name in SOURCE_FILE}

    def read(self, box: Box, level: int) -> RGB:
        """See `ShownSlide`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        try:
            self._slide.read(box, level, out=out.transpose(2, 0, 1))
        # Not raised: a viewer marks what is damaged and shows the rest.
        except StoreError:
            mark_damage(out)
        return out

    def tissue(self) -> TissueMask | None:
        """See `ShownSlide`."""
        mask, mpp = self._slide.tissue()
        finest = self._slide.levels[0].mpp
        return TissueMask(mask, (mpp[0] / finest[0], mpp[1] / finest[1]))

    def close(self) -> None:
        """See `ShownSlide`."""


class FilePixels:
    """A slide's file.

    Args:
        path: The file, or the folder of one DICOM slide.
        manifest_mpp: The manifest's ``source_mpp``; may be empty.
        slide_mpp: Micrometres per pixel if neither file nor manifest states them.
        used_mpp: Micrometres per pixel (y, x) with which the slide was predicted, which take precedence; None: not
            predicted.
        pick: Which picture of the file is shown.

    Raises:
        SlideError: The file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        manifest_mpp: str = "",
        slide_mpp: float | None = None,  # if neither file nor manifest states it
        used_mpp: tuple[float, float] | None = None,  # with which the slide was predicted
        pick: Pick = WHOLE,
    ) -> None:
        self._path = path
        self._source = source = open_source(path, pick)
        self.mpp: tuple[float, float] | None = None
        note = ""
        try:
            doubt = source.facts.mpp_doubt
            self.mpp = used_mpp or resolve_mpp(source.mpp, manifest_mpp, slide_mpp, doubt=doubt).um
        except SlideError as error:
            note = str(error)
        self.levels = tuple(
            ShownLevel(v.height_px, v.width_px, v.downsample, _block_of(v.tile_px)) for v in source.levels
        )
        affine = np.array(source.to_file_px, np.float64)
        affine[:, 2] -= source.bounds.y0, source.bounds.x0  # QuPath counts from the corner of the bounds
        self.to_level0 = SlideGrid(affine)
        self.facts = (("Scanner", source.vendor), *_mpp_fact(self.mpp, note), *_power_fact(source.objective_power))

    def source_file(self) -> Mapping[str, Any]:
        """See `ShownSlide`. Without the digest, for which a slide of gigabytes would be read."""
        # On object storage, all objects of a slide would be listed.
        return {} if is_remote(self._path) else {"size_bytes": SourceStamp.of(self._path).size_bytes}

    def read(self, box: Box, level: int) -> RGB:
        """See `ShownSlide`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        bad: list[BadTile] = []
        # With a list, bad tiles do not raise.
        self._source.read_into(box, level, out, bad)
        for tile in bad:
            mark_damage(out[tile.box.intersect(box).relative_to(box).slices()])
        return out

    def tissue(self) -> TissueMask | None:
        """See `ShownSlide`. The mask is computed here, at about 8 µm per pixel; None if the slide is damaged."""
        try:
            # longest_px=1: the picture itself is not needed.
            mask = thumbnail_of_source(self._source, self.mpp, longest_px=1)[0].tissue
        except SlideError:
            return None
        if mask is None:
            return None
        finest = self.levels[0]
        return TissueMask(mask, (finest.height_px / mask.shape[0], finest.width_px / mask.shape[1]))

    def close(self) -> None:
        """See `ShownSlide`."""
        self._source.close()


def mark_damage(out: RGB) -> None:
    """Fill an area that cannot be decoded with stripes, so that it does not look like glass."""
    height, width = out.shape[:2]
    # Diagonal: neither tissue nor glass looks so.
    stripe = (np.arange(height)[:, None] + np.arange(width)) // _DAMAGE_STRIPE_PX % 2 == 0
    out[...] = np.where(stripe[..., None], *_DAMAGE)


def _block_of(tile_px: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of a block: whole tiles of the file, about 512 pixels, at most 1024."""
    return tuple(  # type: ignore[return-value]
        LARGEST_BLOCK_PX if side > LARGEST_BLOCK_PX else max(1, round(STORE_BLOCK_PX / side)) * side for side in tile_px
    )


def _grid_of_store(slide: SlideStore) -> SlideGrid:
    """Return the map from a store's pixels to level 0 of its file; the identity if the store does not state it."""
    if "affine" not in slide.attributes or "source" not in slide.attributes:
        return SlideGrid(np.eye(2, 3))
    finest = slide.levels[0].mpp
    return SlideGrid.of(slide.attributes, finest, finest)


def _facts_of_store(slide: SlideStore) -> tuple[tuple[str, str], ...]:
    """Return (name, text) of the facts about a stored slide."""
    attributes: dict[str, Any] = slide.attributes
    source = attributes.get("source", {})
    facts = [("Scanner", str(source["vendor"]))] if "vendor" in source else []
    facts += [*_mpp_fact(slide.levels[0].mpp, ""), *_power_fact(source.get("objective_power"))]
    fraction = attributes.get("tissue", {}).get("fraction")
    facts += [] if fraction is None else [("Tissue", f"{fraction:.1%} of the slide")]
    return (*facts, ("Flags", ", ".join(attributes["flags"]))) if attributes.get("flags") else tuple(facts)


def _mpp_fact(mpp: tuple[float, float] | None, note: str) -> tuple[tuple[str, str], ...]:
    if mpp is None:
        return (("Pixel size", f"unknown: {note}"),)
    y, x = mpp
    return (("Pixel size", f"{x:.4g} µm" if abs(x - y) < 1e-6 * x else f"{x:.4g} × {y:.4g} µm"),)


def _power_fact(power: float | None) -> tuple[tuple[str, str], ...]:
    return () if power is None else (("Objective", f"{power:g}×"),)
