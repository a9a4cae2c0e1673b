"""Small models for tests of cells."""

from __future__ import annotations

import torch
from torch import nn


class Dense(nn.Module):
    """Each layer takes all maps before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4 * (n + 1)) for n in range(4)])
        self.layers = nn.ModuleList([nn.Conv2d(4 * (n + 1), 4, 3, padding=1, bias=False) for n in range(4)])
        self.head = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            maps.append(layer(torch.relu(norm(torch.cat(maps, 1)))))
        return self.head(torch.cat(maps, 1).mean((2, 3)))
