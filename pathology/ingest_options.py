"""What the user asks of an ingest, and which of it belongs to a slide's identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hyfi_core.errors import RequestError
from pathology.mpp import SENSIBLE_UM
from pathology.tissue import TissueParameters


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """How slides become a store; checked when it is built.

    Attributes:
        mpp: Microns per pixel of the store's finest level.
        slide_mpp: Microns per pixel of the finest level of slides that do not state them.
        codec: ``zstd:N``, N from 1 (fast) to 22 (small).
        max_bad: Share of a slide's tiles that may be undecodable (white, and counted).
        tissue: Parameters of the tissue mask.

    Raises:
        RequestError: A value is out of range.
    """

    mpp: float = 1.0
    slide_mpp: float | None = None
    codec: str = "zstd:1"
    max_bad: float = 0.0
    tissue: TissueParameters = field(default_factory=TissueParameters)

    def __post_init__(self) -> None:
        low, high = SENSIBLE_UM
        for name, value in (("--mpp", self.mpp), ("--slide-mpp", self.slide_mpp)):
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name} {value:g}: microns per pixel from {low:g} to {high:g} are expected")
        if not 0 <= self.max_bad <= 1:
            raise RequestError(f"--max-bad {self.max_bad:g}: a share from 0 to 1 is expected")
        _ = self.zstd_level

    @property
    def zstd_level(self) -> int:
        """Compression level of `codec`."""
        name, _, level = self.codec.partition(":")
        if name != "zstd" or not level.isdigit() or not 1 <= int(level) <= 22:
            raise RequestError(f"--codec {self.codec}: zstd:1 (fast) to zstd:22 (small) are expected")
        return int(level)

    def parameters(self) -> dict[str, Any]:
        """Return what decides a slide's pixels and mask: the same parameters and source give the same store."""
        return {"mpp": self.mpp, "codec": f"zstd:{self.zstd_level}", "tissue": self.tissue.to_json()}
