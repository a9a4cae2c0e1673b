"""Options of a prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from data.store.slide_store import SlideStore
from hyfi_core.errors import RequestError
from hyfi_core.plan.device import DeviceRequest
from pathology.tissue.outlines import SlideGrid, mask_of_geojson

OFF = "off"
RanksPerSlide = int | Literal["auto"] | None
Image = Literal["whole", "trained"]


@dataclass(frozen=True)
class PredictOptions:
    """Options of a prediction, validated on creation.

    Attributes:
        mpp: Micrometres per pixel of the images; None: the checkpoint's.
        slide_mpp: Micrometres per pixel of slide files that do not state a plausible value.
        overwrite: Predict finished slides again, and replace results of other checkpoints.
        cells: Rows and columns of cells in which one process computes every image; None: only large images have cells.
        image: ``whole``: images show all tissue of a slide; ``trained``: one image of the trained size.
        tissue: Tissue mask: ``off``: the whole slide; a GeoJSON of one slide, or a folder with
            ``<slide_id>.geojson``; None: the detected one.
        device: ``cuda``: one GPU for each rank; ``auto``: GPUs if there are enough; or ``cpu``.
        ranks_per_slide: Ranks that share a slide; the others predict other slides at the same time. ``auto``: as few
            as keep all ranks busy; None: all ranks.
        allow_partial: Predict slides of which less tissue was seen than the checkpoint requires.

    Raises:
        RequestError: ``image`` is not allowed.
    """

    mpp: float | None = None
    slide_mpp: float | None = None
    overwrite: bool = False
    cells: tuple[int, int] | None = None
    image: Image = "whole"
    allow_partial: bool = False
    tissue: str | None = None
    device: DeviceRequest = "auto"
    ranks_per_slide: RanksPerSlide = None

    def tissue_file(self, slide_id: str) -> Path | None:
        """Return the path of the GeoJSON with a slide's tissue; None if there is none."""
        if self.tissue is None or self.tissue == OFF:
            return None
        path = Path(self.tissue)
        if not path.is_dir():
            return path
        path /= f"{slide_id}.geojson"
        return path if path.exists() else None

    def tissue_given(self, slide_id: str) -> str | None:
        """Return an identifier of a slide's given tissue mask: ``off``, or the SHA-256 of the file; None if detected.

        Raises:
            RequestError: the file cannot be read.
        """
        if self.tissue == OFF:
            return OFF
        path = self.tissue_file(slide_id)
        try:
            return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise RequestError(f"--tissue {path}: cannot be read ({error.strerror or error})") from error

    def opened(self, path: Path) -> SlideStore:
        """Open a stored slide with the requested tissue mask.

        Raises:
            StoreError: See `SlideStore.open`.
            RequestError: the tissue file is not a GeoJSON with polygons.
        """
        slide = SlideStore.open(path)
        file = self.tissue_file(slide.slide_id)
        if self.tissue is None or (self.tissue != OFF and file is None):
            return slide
        mask, mpp = slide.tissue()
        if file is None:
            return slide.with_tissue(np.ones_like(mask))
        grid = SlideGrid.of(slide.attributes, slide.levels[0].mpp, mpp)
        return slide.with_tissue(mask_of_geojson(file, grid, mask.shape))

    def check_tissue(self, slide_ids: Sequence[str]) -> None:
        """Check ``tissue`` against the slides.

        Raises:
            RequestError: the file or folder is missing, no slide has a file in it, or one file is for several slides.
        """
        if self.tissue is None or self.tissue == OFF:
            return
        path = Path(self.tissue)
        if not path.exists():
            raise RequestError(
                f"--tissue {path}: no such file or folder; give a GeoJSON file, a folder of them, or off"
            )
        if path.is_dir() and not any(self.tissue_file(name) for name in slide_ids):
            raise RequestError(
                f"--tissue {path}: no <slide_id>.geojson for any of these slides, such as {slide_ids[0]}.geojson"
            )
        if not path.is_dir() and len(slide_ids) > 1:
            raise RequestError(
                f"--tissue {path}: one file for {len(slide_ids)} slides; give a folder with a <slide_id>.geojson for "
                f"each"
            )

    def __post_init__(self) -> None:
        if self.image not in get_args(Image):
            raise RequestError(f"--image {self.image}: expected {' or '.join(get_args(Image))}")
