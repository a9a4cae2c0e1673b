"""The three normalisations a model can be built with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.errors import RequestError

NORMS = ("train", "frozen", "group")


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that always applies its running statistics, in training mode too.

    Nothing in it learns: the affine parameters are frozen and the statistics stay as they were loaded. It keeps the
    state dict of ``nn.BatchNorm2d``, so weights trained with live statistics load without renaming.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``(B, C, H, W)`` by the running mean and variance; returns a new tensor of that shape."""
        return F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


def check_norm(norm: str) -> None:
    """Raise RequestError unless ``norm`` is one of ``NORMS``."""
    if norm not in NORMS:
        raise RequestError(f"model.norm is {norm!r}; use one of {', '.join(NORMS)}")


def make_norm(norm: str, channels: int) -> nn.Module:
    """Return the normalisation of a map of ``channels`` channels.

    ``train`` is batch norm with live statistics, ``frozen`` batch norm with loaded ones, ``group`` group norm with the
    32 groups of Wu & He (2018), fewer where a group would have less than two channels or an unequal share.

    Raises:
        RequestError: ``norm`` is none of ``NORMS``.
    """
    check_norm(norm)
    if norm == "train":
        return nn.BatchNorm2d(channels)
    if norm == "frozen":
        return FrozenBatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(32, max(1, channels // 2)), channels)
