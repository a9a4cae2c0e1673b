"""An open slide as the viewer sees it: levels of RGB pixels from a store or a slide file, and where they lie.

A slide is shown in pixels of its finest level ("shown pixels"): of the store where it comes from one, else of the file.
What is written or read beside the slide (regions, annotations) counts as QuPath does: pixels of the file's finest
level, minus the slide's bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data.store.slide_store import SlideStore, StoreError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.thumbnail import thumbnail_of_source
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
    """One level: size in pixels, shown pixels under one of its own as (y, x), and what is read at a time."""

    height_px: int
    width_px: int
    downsample: tuple[float, float]
    block_px: tuple[int, int]


@dataclass(frozen=True)
class TissueMask:
    """Where the tissue is: ``(h, w)`` bool from the slide's corner on, and the shown pixels under one as (y, x)."""

    mask: NDArray[np.bool_]
    pixel_px: tuple[float, float]


class ShownSlide(Protocol):
    """An open slide; threads may share it.

    Attributes:
        levels: finest first.
        mpp: micrometres per shown pixel as (y, x); None where nobody knows.
        to_level0: from shown (row, column) to (x, y) as QuPath counts it, and back.
        facts: what a person may want to know, as (name, words).
    """

    levels: tuple[ShownLevel, ...]
    mpp: tuple[float, float] | None
    to_level0: SlideGrid
    facts: tuple[tuple[str, str], ...]

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)`` uint8 of a box inside a level; what is damaged is striped, never white."""

    def tissue(self) -> TissueMask | None:
        """Return where the tissue is; None where that is not known."""

    def close(self) -> None:
        """Let go of the file."""


class StoredPixels:
    """A slide of a store.

    Args:
        path: ``STORE/<slide_id>.zarr``.

    Raises:
        StoreError: it is missing or damaged.
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

    def read(self, box: Box, level: int) -> RGB:
        """See `ShownSlide`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        try:
            self._slide.read(box, level, out=out.transpose(2, 0, 1))
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
        path: the file, or the folder of one DICOM slide.
        manifest_mpp: the manifest's ``source_mpp``; may be empty.
        slide_mpp: micrometres per pixel where neither file nor manifest says them.

    Raises:
        SlideError: it cannot be opened.
    """

    def __init__(self, path: Path, manifest_mpp: str = "", slide_mpp: float | None = None) -> None:
        self._source = source = open_source(path)
        self.mpp: tuple[float, float] | None = None
        note = ""
        try:
            self.mpp = resolve_mpp(source.mpp, manifest_mpp, slide_mpp).um
        except SlideError as error:
            note = str(error)
        self.levels = tuple(
            ShownLevel(v.height_px, v.width_px, v.downsample, _block_of(v.tile_px)) for v in source.levels
        )
        affine = np.array(source.to_file_px, np.float64)
        affine[:, 2] -= source.bounds.y0, source.bounds.x0
        self.to_level0 = SlideGrid(affine)
        self.facts = (("Scanner", source.vendor), *_mpp_fact(self.mpp, note), *_power_fact(source.objective_power))

    def read(self, box: Box, level: int) -> RGB:
        """See `ShownSlide`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        bad: list[BadTile] = []
        self._source.read_into(box, level, out, bad)
        for tile in bad:
            mark_damage(out[tile.box.intersect(box).relative_to(box).slices()])
        return out

    def tissue(self) -> TissueMask | None:
        """See `ShownSlide`; found here, at about 8 µm per pixel, and undamaged slides only."""
        try:
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
    """Stripe pixels that cannot be decoded, so that nobody takes them for glass."""
    height, width = out.shape[:2]
    stripe = (np.arange(height)[:, None] + np.arange(width)) // _DAMAGE_STRIPE_PX % 2 == 0
    out[...] = np.where(stripe[..., None], *_DAMAGE)


def _block_of(tile_px: tuple[int, int]) -> tuple[int, int]:
    """Return what to read at a time: whole tiles of the file, about 512 pixels, where its tiles are not huge."""
    return tuple(  # type: ignore[return-value]
        LARGEST_BLOCK_PX if side > LARGEST_BLOCK_PX else max(1, round(STORE_BLOCK_PX / side)) * side for side in tile_px
    )


def _grid_of_store(slide: SlideStore) -> SlideGrid:
    """Return how the store's pixels become the file's; its own pixels where it does not know a file."""
    if "affine" not in slide.attributes or "source" not in slide.attributes:
        return SlideGrid(np.eye(2, 3))
    finest = slide.levels[0].mpp
    return SlideGrid.of(slide.attributes, finest, finest)


def _facts_of_store(slide: SlideStore) -> tuple[tuple[str, str], ...]:
    about: dict[str, Any] = slide.attributes
    source = about.get("source", {})
    facts = [("Scanner", str(source["vendor"]))] if "vendor" in source else []
    facts += [*_mpp_fact(slide.levels[0].mpp, ""), *_power_fact(source.get("objective_power"))]
    fraction = about.get("tissue", {}).get("fraction")
    facts += [] if fraction is None else [("Tissue", f"{fraction:.1%} of the slide")]
    return (*facts, ("Flags", ", ".join(about["flags"]))) if about.get("flags") else tuple(facts)


def _mpp_fact(mpp: tuple[float, float] | None, note: str) -> tuple[tuple[str, str], ...]:
    if mpp is None:
        return (("Pixel size", f"not known: {note}"),)
    y, x = mpp
    return (("Pixel size", f"{x:.4g} µm" if abs(x - y) < 1e-6 * x else f"{x:.4g} × {y:.4g} µm"),)


def _power_fact(power: float | None) -> tuple[tuple[str, str], ...]:
    return () if power is None else (("Objective", f"{power:g}×"),)
