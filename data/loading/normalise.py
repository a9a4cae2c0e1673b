"""Normalisation of stored bytes for the model; in the trainer, so that only bytes are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Normalisation:
    """(pixel / 255 − mean) / std, for each band.

    Attributes:
        mean: of the bands R, G, B, in 0 … 1. The default is that of torchvision's pretrained weights.
        std: likewise.
    """

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Normalisation:
        """Build from ``model.json``'s ``normalisation``."""
        mean, std = (tuple(float(number) for number in value[key]) for key in ("mean", "std"))
        return cls(mean, std)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, list[float]]:
        """Return what ``from_json`` takes."""
        return {key: list(value) for key, value in asdict(self).items()}

    def __call__(
        self,
        pixels: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> torch.Tensor:
        """Return ``(B, 3, h, w)`` of ``dtype``, newly allocated where ``pixels``, uint8 of that shape, are."""
        scale = [1 / (255 * std) for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        made = torch.tensor([scale, shift], dtype=dtype).to(pixels.device, non_blocking=True)
        images = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=memory_format)
        if memory_format != torch.channels_last:
            return images.copy_(pixels).mul_(made[0].view(3, 1, 1)).add_(made[1].view(3, 1, 1))
        # Band by band, then row by row: a loop over three bands innermost takes three times as long.
        for band in range(3):
            images[:, band].copy_(pixels[:, band])
        count, _, height, width = pixels.shape
        rows = images.permute(0, 2, 3, 1).view(count, height, width * 3)
        rows.mul_(made[0].repeat(width)).add_(made[1].repeat(width))
        return images
