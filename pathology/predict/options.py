"""Options of a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from data.store.slide_store import SlideStore
from hyfi_core.errors import RequestError
from hyfi_core.plan.device import DeviceRequest
from hyfi_core.plan.parallel_plan import ParallelPlan
from pathology.dealing import RanksPerSlide
from pathology.ingest.options import IngestOptions
from pathology.tissue.given import GivenTissue, SlideTissue
from pathology.tissue.outlines import SlideGrid
from pathology.tissue.tissue import TissueParameters

Image = Literal["whole", "trained"]
Evidence = Literal["map", "occlusion", "gradient"]
MOST_FORWARDS = 256
"""Default of the most forwards of each model for a slide's occlusion."""


@dataclass(frozen=True)
class PredictOptions:
    """Options of a prediction, validated on creation.

    Attributes:
        mpp: Micrometres per pixel of the images; None: the checkpoint's.
        slide_mpp: Micrometres per pixel of slide files that do not state a plausible value.
        force_mpp: Whether ``slide_mpp`` and the manifest override even a plausible value of the file.
        mpp_from_magnification: Whether slides that state only a magnification get its usual microns per pixel.
        overwrite: Predict finished slides again, and replace results of other checkpoints.
        cells: (rows, columns) of cells into which each process divides its part of an image; ``auto``: as many as
            ``memory_bytes`` requires; None: only large images have cells.
        memory_bytes: Memory limit of a process, for ``cells`` and ``spill``; None: half of the free memory.
        spill: Where maps are spilled that no cell currently needs: a folder, or ``memory`` of a GPU's host; None: they
            stay.
        image: ``whole``: images show all tissue of a slide; ``trained``: one image of the trained size.
        tissue: Tissue mask: ``off``: the whole slide; a GeoJSON of one slide, or a folder with
            ``<slide_id>.geojson``; None: the detected one.
        device: ``cuda``: one GPU for each rank; ``auto``: GPUs if there are enough; or ``cpu``.
        ranks_per_slide: Ranks that share a slide; the others predict other slides at the same time. ``auto``: as few
            as keep all ranks busy; None: all ranks.
        features: Folder of the slides' features, for models that were trained on features; None: not given.
        allow_partial: Whether to predict slides with less seen tissue than the checkpoint requires.
        evidence: ``map``: the heatmap of the model's own map, if it pools one; ``occlusion``: also by how much the
            outputs drop without each block of tissue, for models of images; ``gradient``: also the estimate of that
            by gradient × input.
        evidence_blocks: Most forwards of a slide for ``occlusion``, by each model; None: `MOST_FORWARDS`.

    Raises:
        RequestError: ``image`` or ``evidence`` is not allowed, or options do not fit together.
    """

    mpp: float | None = None
    slide_mpp: float | None = None
    force_mpp: bool = False
    mpp_from_magnification: bool = False
    overwrite: bool = False
    cells: tuple[int, int] | Literal["auto"] | None = None
    memory_bytes: int | None = None
    spill: str | None = None
    image: Image = "whole"
    allow_partial: bool = False
    tissue: str | None = None
    device: DeviceRequest = "auto"
    ranks_per_slide: RanksPerSlide = None
    features: Path | None = None
    evidence: Evidence = "map"
    evidence_blocks: int | None = None

    @property
    def most_forwards(self) -> int:
        """Most forwards of each model for a slide's occlusion."""
        return self.evidence_blocks or MOST_FORWARDS

    @property
    def given_tissue(self) -> GivenTissue | None:
        """The given tissue masks; None to detect them."""
        return None if self.tissue is None else GivenTissue(self.tissue)

    def tissue_given(self, slide_id: str) -> str | None:
        """Return an identifier of a slide's given tissue mask: ``off``, or the SHA-256 of the file; None if detected.

        Raises:
            RequestError: the file cannot be read.
        """
        tissue = self._tissue_of(slide_id)
        return None if tissue is None else tissue.identity

    def _tissue_of(self, slide_id: str) -> SlideTissue | None:
        return None if self.given_tissue is None else self.given_tissue.of(slide_id)

    def opened(self, path: Path) -> SlideStore:
        """Open a stored slide with the requested tissue mask.

        Raises:
            StoreError: See `SlideStore.open`.
            RequestError: the tissue file is not a GeoJSON with polygons of this slide.
        """
        slide = SlideStore.open(path)
        tissue = self._tissue_of(slide.slide_id)
        if tissue is None:
            return slide
        mask, mpp = slide.tissue()
        return slide.with_tissue(tissue.mask(SlideGrid.of(slide.attributes, slide.levels[0].mpp, mpp), mask.shape))

    def check_tissue(self, slide_ids: Sequence[str]) -> str:
        """Check ``tissue`` against the slides and return a note for the user; see `GivenTissue.check`."""
        return "" if self.given_tissue is None else self.given_tissue.check(slide_ids)

    def __post_init__(self) -> None:
        if self.image not in get_args(Image):
            raise RequestError(f"--image {self.image}: expected {' or '.join(get_args(Image))}")
        if self.evidence not in get_args(Evidence):
            raise RequestError(f"--evidence {self.evidence}: expected {' or '.join(get_args(Evidence))}")
        if self.evidence_blocks is not None and (self.evidence != "occlusion" or self.evidence_blocks < 1):
            raise RequestError(
                f"--evidence-blocks {self.evidence_blocks}: give the most forwards for each slide, 1 or more, together "
                f"with --evidence occlusion"
            )
        # Create a plan only for its checks of cells, memory and spill.
        ParallelPlan(((1, 1),), cells=self.cells, memory_bytes=self.memory_bytes, spill=self.spill)


def ingest_options(config: Mapping[str, Any], mpp: float, options: PredictOptions) -> IngestOptions:
    """Return the options with which the training slides were ingested, at the resolution of the prediction.

    Args:
        config: ``model.json``.
        mpp: Microns per pixel of the prediction.
        options: Options of the prediction.
    """
    saved = config.get("tissue") or {}
    names = {item.name for item in fields(TissueParameters)}
    # Older models do not state how pen marks were treated: they were removed from the mask.
    tissue: dict[str, Any] = {"pen": "mask"} | {
        k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in names
    }
    return IngestOptions(
        mpp=mpp,
        slide_mpp=options.slide_mpp,
        force_mpp=options.force_mpp,
        mpp_from_magnification=options.mpp_from_magnification,
        tissue=TissueParameters(**tissue),
    )
