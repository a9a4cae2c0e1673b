"""An encoder that the benchmark loads by name."""

from __future__ import annotations

from torch import nn

from workflows.benchmarks.tiles.__main__ import PatchEncoder


def vision_transformer(width: int, depth: int) -> nn.Module:
    """Return a vision transformer of 16 px patches with random weights."""
    return PatchEncoder(width, depth)
