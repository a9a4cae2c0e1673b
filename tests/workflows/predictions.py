"""A small checkpoint that predicts, and what predictions say."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from hyfi_core.models.by_name import build_model
from hyfi_core.runtime.checkpoint import save_checkpoint
from tests.pathology.slides import member_of

MODEL = {"name": "resnet10", "classes": 2, "norm": "train", "pool": "avg", "options": {"width": 8}}


def save(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = build_model(MODEL)
    config = {**member_of(model).config, "model": MODEL, "size_px": [320, 330]}
    save_checkpoint(folder, weights=model.state_dict(), model={k: v for k, v in config.items() if k != "files"})
    return folder


def rows_of(out: Path) -> dict[str, dict[str, str]]:
    with (out / "predictions.csv").open(newline="") as file:
        return {row["slide_id"]: row for row in csv.DictReader(file)}
