"""The setting of a check: its device, and the sizes of all its parts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

CHANNELS_LAST = "channels-last float32"
"""Name of the comparison in the memory format and dtype of most runs; all others are in float64."""


@dataclass(frozen=True)
class CheckSizes:
    """Sizes of all parts.

    Attributes:
        equal_px: Side of the images whose gradients are compared.
        amoebanet: Layers and filters of AmoebaNet-D.
        network: Name of the ResNet that is timed.
        speed_px: Sides of the images of timed steps; cells are measured at the last.
        staged_px: Side of the image of two ranks that share a GPU.
        forecast_px: Sides of the images whose memory is compared with the forecast.
        ladder_px: Sides to try for the largest image, rising.
        slides_px: Side of the slides that commands train on.
        steps: Timed steps.
        cells: Grids of cells.
        pieces_px: Sides of the images of steps that are computed piece by piece; in core, too, at those of timed steps.
        pieces: Number of pieces.
    """

    equal_px: int
    amoebanet: tuple[int, int]
    network: str
    speed_px: tuple[int, ...]
    staged_px: int
    forecast_px: tuple[int, ...]
    ladder_px: tuple[int, ...]
    slides_px: int
    steps: int
    cells: tuple[tuple[int, int], ...]
    pieces_px: tuple[int, ...]
    pieces: int


FULL = CheckSizes(
    equal_px=256,
    amoebanet=(6, 64),
    network="resnet50",
    speed_px=(4096, 8192),
    staged_px=2048,
    forecast_px=(2048, 4096),
    ladder_px=(4096, 6144, 8192, 10240, 12288, 16384, 20480, 24576, 32768),
    slides_px=2048,
    steps=5,
    cells=((2, 2), (4, 4)),
    pieces_px=(4096, 8192, 16384),
    pieces=8,
)
SMALL = CheckSizes(
    equal_px=64,
    amoebanet=(3, 16),
    network="resnet6",
    speed_px=(64,),
    staged_px=64,
    forecast_px=(64,),
    ladder_px=(64, 96),
    slides_px=512,
    steps=1,
    cells=((2, 2),),
    pieces_px=(64,),
    pieces=2,
)
"""Sizes for a check without a GPU, which runs the code of every part; its figures mean nothing."""


@dataclass(frozen=True)
class Setting:
    """The device and sizes of a part's measurements.

    Attributes:
        device: Device of this process.
        sizes: Sizes of all parts.
        out: Folder of results.
        deadline_s: Time by ``time.monotonic`` at which this part must have ended.
    """

    device: torch.device
    sizes: CheckSizes
    out: Path
    deadline_s: float = math.inf

    @property
    def seconds_left(self) -> float:
        """Seconds until the end of this part's time."""
        return self.deadline_s - time.monotonic()

    @property
    def autocast(self) -> torch.dtype:
        """The dtype of timed steps."""
        return torch.bfloat16
