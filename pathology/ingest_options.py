"""What the user asks of an ingest, and which of it belongs to a slide's identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data.store_codec import PixelCodec
from hyfi_core.errors import RequestError
from pathology.mpp import SENSIBLE_UM
from pathology.tissue import TissueParameters

GLASS = ("keep", "blank")


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """How slides become a store; checked when it is built.

    Attributes:
        mpp: Microns per pixel of the store's finest level.
        slide_mpp: Microns per pixel of the finest level of slides that do not state them.
        codec: ``zstd:N``, N from 1 (fast) to 22 (small), or ``jpeg:Q``, Q from 1 to 100 (lossy).
        max_bad: Share of a slide's tiles that may be undecodable (white, and counted).
        glass: ``keep`` writes the whole slide; ``blank`` leaves out what lies far from tissue.
        sharded: Files are shards of 8 × 8 chunks; otherwise every chunk is a file.
        crop_tissue: Write the box around the tissue only.
        tissue: Parameters of the tissue mask.

    Raises:
        RequestError: A value is out of range.
    """

    mpp: float = 1.0
    slide_mpp: float | None = None
    codec: str = "zstd:1"
    max_bad: float = 0.0
    glass: str = "keep"
    sharded: bool = True
    crop_tissue: bool = False
    tissue: TissueParameters = field(default_factory=TissueParameters)

    def __post_init__(self) -> None:
        low, high = SENSIBLE_UM
        for name, value in (("--mpp", self.mpp), ("--slide-mpp", self.slide_mpp)):
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name} {value:g}: microns per pixel from {low:g} to {high:g} are expected")
        if not 0 <= self.max_bad <= 1:
            raise RequestError(f"--max-bad {self.max_bad:g}: a share from 0 to 1 is expected")
        if self.glass not in GLASS:
            raise RequestError(f"--glass {self.glass}: {' or '.join(GLASS)} are expected")
        _ = self.pixel_codec

    @property
    def pixel_codec(self) -> PixelCodec:
        """How chunks are compressed.

        Raises:
            RequestError: `codec` is something else.
        """
        return PixelCodec.parse(self.codec)

    def parameters(self) -> dict[str, Any]:
        """Return what decides a slide's pixels and mask: the same parameters and source give the same store.

        What was not asked for is left out, so that a store stays the same when options are added.
        """
        asked = {
            "glass": None if self.glass == "keep" else self.glass,
            "sharded": None if self.sharded else False,
            "crop_tissue": True if self.crop_tissue else None,
        }
        always = {"mpp": self.mpp, "codec": str(self.pixel_codec), "tissue": self.tissue.to_json()}
        return always | {name: value for name, value in asked.items() if value is not None}
