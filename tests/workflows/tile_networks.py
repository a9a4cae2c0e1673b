"""Encoders of tiles for tests."""

from __future__ import annotations

from torch import nn


def small_cnn(width: int = 8, dropout: float = 0.0) -> nn.Module:
    """Two convolutions and a mean: (n, 3, T, T) to (n, width)."""
    return nn.Sequential(
        nn.Conv2d(3, width, 5, 4), nn.ReLU(), nn.Dropout(dropout), nn.Conv2d(width, width, 3, 2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def small_mixer(width: int = 8) -> nn.Module:
    """A convolution, a norm and two linear layers: (n, 3, T, T) to (n, width)."""
    return nn.Sequential(
        nn.Conv2d(3, width, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width),
        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width),
    )  # fmt: skip


def normed_cnn(width: int = 8) -> nn.Module:
    """A convolution, batch norm and a mean: (n, 3, T, T) to (n, width)."""
    return nn.Sequential(
        nn.Conv2d(3, width, 5, 4), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
