"""Options of an ingest, and those that belong to a slide's identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.store.codec import PixelCodec
from hyfi_core.errors import RequestError
from pathology.errors import SlideError
from pathology.readers.facts.pictures import Pick
from pathology.readers.mpp import SENSIBLE_UM, SourceMpp, resolve_mpp
from pathology.readers.slide_source import SlideSource
from pathology.tissue.given import GivenTissue, SlideTissue
from pathology.tissue.tissue import PEN_MODES, TissueParameters

GLASS = ("keep", "blank")
ICC = ("keep", "apply")


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Options of an ingest, validated on creation.

    Attributes:
        mpp: Microns per pixel of the store's finest level; a level within 1 % of it is not resampled.
        native: Whether each slide keeps the microns per pixel of its finest level; ``mpp`` is then ignored.
        slide_mpp: Microns per pixel of the finest level of slides that do not state a plausible value.
        force_mpp: Whether ``slide_mpp`` and the manifest override even a plausible value of the file.
        mpp_from_magnification: Whether slides that state only a magnification get its usual microns per pixel.
        scene: Which scenes of files with several are slides: ``all``; ``largest``; or a number from 1.
        plane: Number of the focal plane of files with several, from 1; 0: such files are refused.
        codec: ``zstd:N``, N from 1 (fast) to 22 (small), or ``jpeg:Q``, Q from 1 to 100 (lossy).
        max_bad: Fraction of a slide's tiles that may be undecodable (white, and counted).
        glass: ``keep`` writes the whole slide; ``blank`` omits chunks far from tissue.
        sharded: True: each file is a shard of 8 × 8 chunks; False: each chunk is a file.
        crop_tissue: Write only the bounding box of the tissue.
        lossless: Keep the scanner's JPEG tiles and levels as they are; ``mpp`` is then ignored.
        icc: ``keep`` stores pixels unchanged with the profile; ``apply`` converts them to sRGB.
        cache: Folder on a local disk to which each slide is copied before reading; None: no copy.
        tissue: Parameters of the tissue mask.
        given_tissue: ``off``: the whole slide is tissue; a GeoJSON of one slide, or a folder with
            ``<slide_id>.geojson``; None: tissue is detected.

    Raises:
        RequestError: A value is out of range.
    """

    mpp: float = 1.0
    native: bool = False
    slide_mpp: float | None = None
    force_mpp: bool = False
    mpp_from_magnification: bool = False
    scene: str = "all"
    plane: int = 0
    codec: str = "zstd:1"
    max_bad: float = 0.0
    glass: str = "keep"
    sharded: bool = True
    crop_tissue: bool = False
    lossless: bool = False
    icc: str = "keep"
    cache: Path | None = None
    tissue: TissueParameters = field(default_factory=TissueParameters)
    given_tissue: str | None = None

    def __post_init__(self) -> None:
        low, high = SENSIBLE_UM
        for name, value in (("--mpp", self.mpp), ("--slide-mpp", self.slide_mpp)):
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name} {value:g}: expected microns per pixel from {low:g} to {high:g}")
        if self.scene not in ("all", "largest") and not (self.scene.isdecimal() and int(self.scene) > 0):
            raise RequestError(f"--scene {self.scene}: expected all, largest or a number from 1")
        if self.plane < 0:
            raise RequestError(f"--plane {self.plane}: expected a number from 1")
        if not 0 <= self.max_bad <= 1:
            raise RequestError(f"--max-bad {self.max_bad:g}: expected a fraction from 0 to 1")
        if self.glass not in GLASS:
            raise RequestError(f"--glass {self.glass}: expected {' or '.join(GLASS)}")
        if self.tissue.pen not in PEN_MODES:
            raise RequestError(f"--pen {self.tissue.pen}: expected one of {', '.join(PEN_MODES)}")
        if self.icc not in ICC:
            raise RequestError(f"--icc {self.icc}: expected {' or '.join(ICC)}")
        # Parse the codec, only to refuse a wrong text now.
        _ = self.pixel_codec
        if self.lossless:
            self._require_unchanged_tiles()

    def _require_unchanged_tiles(self) -> None:
        """Refuse options that cannot be combined with ``lossless``."""
        changes = {
            f"--codec {self.codec}": self.codec != "zstd:1",
            "--unsharded": not self.sharded,
            "--crop-tissue": self.crop_tissue,
            "--icc apply": self.icc == "apply",
        }
        changing = [name for name, is_set in changes.items() if is_set]
        if changing:
            raise RequestError(f"--lossless copies the scanner's tiles unchanged: leave {' and '.join(changing)} out")

    @property
    def pixel_codec(self) -> PixelCodec:
        """How chunks are compressed.

        Raises:
            RequestError: `codec` is invalid.
        """
        return PixelCodec.parse(self.codec)

    def at(self, mpp_um: float) -> IngestOptions:
        """Return the options for one slide with these microns per pixel."""
        return replace(self, mpp=mpp_um, native=False)

    def mpp_of(self, slide: SlideSource, row: Mapping[str, str]) -> SourceMpp:
        """Return the microns per pixel of a slide's finest level; ``row``: its row of the user's manifest.

        Raises:
            SlideError: No plausible value is known, or file and manifest contradict each other.
        """
        return resolve_mpp(
            slide.mpp,
            row.get("source_mpp", ""),
            self.slide_mpp,
            self.force_mpp,
            doubt=slide.facts.mpp_doubt,
            power=slide.objective_power,
            objective=row.get("objective", ""),
            from_magnification=self.mpp_from_magnification,
        )

    def pick(self, row: Mapping[str, str]) -> Pick:
        """Return the scene and focal plane to read from a slide's file; ``row``: its row of the user's manifest.

        Raises:
            SlideError: The row's scene is not a number.
        """
        scene = row.get("scene", "").strip()
        if scene and not (scene.isdecimal() and int(scene) > 0):
            raise SlideError(f"the column scene is {scene!r}; expected a number from 1")
        return Pick(int(scene or 0), self.plane)

    def tissue_of(self, slide_id: str) -> SlideTissue | None:
        """Return the given tissue of a slide; None to detect it.

        Raises:
            RequestError: Its file cannot be read, or has no polygon.
        """
        return None if self.given_tissue is None else GivenTissue(self.given_tissue).of(slide_id)

    def parameters(self, slide_id: str) -> dict[str, Any]:
        """Return the parameters that determine the pixels and the mask of a slide.

        Default values of newer options are omitted, so that existing stores stay valid.

        Raises:
            RequestError: See `tissue_of`.
        """
        tissue = self.tissue_of(slide_id)
        if_not_default = {
            "given_tissue": None if tissue is None else tissue.identity,
            "glass": None if self.glass == "keep" else self.glass,
            "sharded": None if self.sharded else False,
            "crop_tissue": True if self.crop_tissue else None,
            "icc": None if self.icc == "keep" else self.icc,
            "plane": self.plane or None,
        }
        pixels = {"mpp": "native" if self.native else self.mpp, "codec": str(self.pixel_codec)}
        # Copied tiles depend on neither ``mpp`` nor ``codec``.
        always = {**({"lossless": True} if self.lossless else pixels), "tissue": self.tissue.to_json()}
        return always | {name: value for name, value in if_not_default.items() if value is not None}
