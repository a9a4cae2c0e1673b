"""Small slides for tests of prediction: pieces of tissue on glass, one of them with a dark focus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile
import torch
from torch import nn

from pathology.predict.members import Member

MPP = 0.5
GLASS = 243
FOCUS = (400, 464, 1600, 1664)
"""(y0, y1, x0, x1) of the dark focus in level-0 pixels; on the grid of 32-pixel cells at 1 µm."""


def draw_slide(height_px: int = 1000, width_px: int = 2000, tissue: bool = True, seed: int = 0) -> np.ndarray:
    """(h, w, 3) uint8: two pieces far apart, so that an image of 512 px at 1 µm holds them only when packed."""
    rng = np.random.default_rng(seed)
    picture = np.full((height_px, width_px, 3), GLASS, np.uint8)
    if tissue:
        for y0, y1, x0, x1 in ((100, 800, 60, 500), (140, 840, 1400, 1880)):
            pink = np.array([205, 130, 170]) + rng.normal(0, 12, (y1 - y0, x1 - x0, 1))
            picture[y0:y1, x0:x1] = pink.clip(90, 235).astype(np.uint8)
        y0, y1, x0, x1 = FOCUS
        picture[y0:y1, x0:x1] = (70, 20, 90)
    return picture


def write_slide(path: Path, picture: np.ndarray, mpp: float | None = MPP) -> Path:
    resolution = {} if mpp is None else {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, picture, tile=(256, 256), compression="deflate", photometric="rgb", **resolution)
    return path


class Darkness(nn.Module):
    """The second class is how dark the image is, in cells of 32 pixels; the first is its opposite."""

    def __init__(self, cell_px: int = 32, seed: int | None = None) -> None:
        super().__init__()
        self.cells = nn.Conv2d(3, 2, cell_px, cell_px)
        self.fc = nn.Linear(2, 2)
        with torch.no_grad():
            self.cells.weight.fill_(-10 / (3 * cell_px**2))
            self.cells.bias.copy_(torch.tensor([0.0, 2.0]))
            self.fc.weight.copy_(torch.tensor([[-1.0, -0.1], [1.0, 0.2]]))
            self.fc.bias.copy_(torch.tensor([0.5, -0.25]))
            if seed is not None:
                torch.manual_seed(seed)
                self.fc.weight.add_(torch.randn(2, 2) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.cells(x)).mean((2, 3)))


def member_of(network: nn.Module, name: str = "one", **changes: object) -> Member:
    config = {
        "model": {"name": "darkness"},
        "class_names": ["pale", "dark"],
        "task": "multiclass",
        "mpp": 1.0,
        "size_px": [512, 576],
        "view": "pack",
        "align_px": 64,
        "tissue": {},
        "normalisation": {"mean": [0.9, 0.9, 0.9], "std": [1.0, 1.0, 1.0]},
        "versions": {"torch": torch.__version__},
        "step": 12,
        "files": {"model.safetensors": {"bytes": 1, "sha256": name}},
        **changes,
    }
    return Member(f"RUN/checkpoints/{name}", network.eval(), config)
