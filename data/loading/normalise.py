"""Normalisation of uint8 pixels for the model; done in the trainer, so that ranks send only bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hyfi_core.ops.constants import Constant

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Normalisation:
    """(pixel / 255 − mean) / std, for each channel.

    Attributes:
        mean: Means of red, green and blue, in 0 … 1; the default is that of torchvision's pretrained weights.
        std: Standard deviations, likewise.
    """

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Normalisation:
        """Build from the ``normalisation`` of ``model.json``."""
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
        """Return normalised ``pixels`` (uint8 ``(B, 3, h, w)``) as a new tensor of ``dtype`` on the same device."""
        affine = _affine(self).on(pixels.device, dtype)
        images = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=memory_format)
        if pixels.device.type != "cpu":
            scale, offset = affine[0].view(3, 1, 1), affine[1].view(3, 1, 1)
            return torch.addcmul(offset, pixels, scale, out=images)  # one kernel: converts, reorders and computes
        # In place on one new tensor: `(pixels / 255 − mean) / std` would allocate the images three times.
        if memory_format != torch.channels_last:
            return images.copy_(pixels).mul_(affine[0].view(3, 1, 1)).add_(affine[1].view(3, 1, 1))
        # Channel by channel, then row by row: an inner loop over three channels would take three times as long.
        for band in range(3):
            images[:, band].copy_(pixels[:, band])
        count, _, height, width = pixels.shape
        rows = images.permute(0, 2, 3, 1).view(count, height, width * 3)
        rows.mul_(affine[0].repeat(width)).add_(affine[1].repeat(width))
        return images


@functools.lru_cache(maxsize=16)
def _affine(normalisation: Normalisation) -> Constant:
    """Return (2, 3): factor and summand of each channel."""
    scale = [1 / (255 * std) for std in normalisation.std]
    shift = [-mean / std for mean, std in zip(normalisation.mean, normalisation.std, strict=True)]
    # float64, rounded once to the type that is asked for.
    return Constant(torch.tensor([scale, shift], dtype=torch.float64))
