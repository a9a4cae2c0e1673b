"""The normalisations of built-in models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.errors import RequestError

NORMS = ("train", "frozen", "group")


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that always applies its running statistics, in training mode too.

    The affine parameters are frozen and the statistics are not updated. Its state dict is that of ``nn.BatchNorm2d``,
    so weights of ordinary batch norms can be loaded.
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
    32 groups of Wu & He (2018), or fewer, so that all groups have the same number of at least two channels. An odd
    number of channels is one group.

    Raises:
        RequestError: ``norm`` is not one of ``NORMS``.
    """
    check_norm(norm)
    if norm == "train":
        return nn.BatchNorm2d(channels)
    if norm == "frozen":
        return FrozenBatchNorm2d(channels)
    return nn.GroupNorm(max(1, math.gcd(64, channels) // 2), channels)
