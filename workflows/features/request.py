"""The request of ``hyfi features``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.tiles.tiling import Tiling
from hyfi_core.errors import RequestError
from hyfi_core.plan.device import DeviceRequest
from workflows.features.feature_file import FeatureFormat

PRECISIONS = ("float32", "bfloat16")
STAINS = ("none", "macenko", "reinhard")


@dataclass(frozen=True)
class FeatureRequest:
    """The arguments of ``hyfi features``.

    Attributes:
        store: The store.
        encoder: Name of the encoder; see `workflows.encoders.load.load_encoder`.
        out: Folder of the features.
        weights: File of weights; None: those of the encoder's folder or factory.
        options: Arguments of the model.
        mean, std: Mean and standard deviation of the pixels; None: as the encoder states.
        tiling: The tiles.
        stain: Normalisation of each slide's colours: ``none``, ``macenko`` or ``reinhard``.
        stain_reference: What has the colours that slides get, see `pathology.tissue.stain_reference`; None: the
            colours that the method's authors published.
        form: Format of the files.
        precision: ``float32`` or ``bfloat16``: the dtype in which the encoder computes.
        batch: Tiles encoded at a time.
        workers: Threads that decode.
        device: Where the encoder computes.
        random_weights: Whether an encoder without weights is accepted.
        allow_download: Whether weights may be downloaded.
        overwrite: Whether features of other settings are replaced.
        part: (i, n): the i-th of n parts of the slides.
    """

    store: Path
    encoder: str
    out: Path
    weights: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    tiling: Tiling = field(default_factory=Tiling)
    stain: str = "none"
    stain_reference: str | None = None
    form: FeatureFormat = "trident"
    precision: str = "float32"
    batch: int = 64
    workers: int = 1
    device: DeviceRequest = "auto"
    random_weights: bool = False
    allow_download: bool = False
    overwrite: bool = False
    part: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.stain not in STAINS:
            raise RequestError(f"--stain-normalisation {self.stain}: use one of {', '.join(STAINS)}")
        if self.stain_reference is not None and self.stain == "none":
            raise RequestError(f"--stain-reference {self.stain_reference}: needs --stain-normalisation")
        if self.precision not in PRECISIONS:
            raise RequestError(f"--precision {self.precision}: use one of {', '.join(PRECISIONS)}")
