"""A small store, written by the project's own writer, and the YAML of a run on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.store.layout import LevelSize, pyramid_levels
from data.store.manifest import SlideRecord, merge_manifest
from data.store.writer import SlideWriter

SIZE_PX = 250  # odd parts: 125 columns for each of two ranks
# As ingest would measure them.
STAINS = {"haematoxylin": [0.65, 0.7, 0.29], "eosin": [0.2, 0.9, 0.38], "strength": [0.9, 0.5]}
SPLITS = ("train",) * 6 + ("val",) * 4 + ("test",) * 2


def make_store(
    folder: Path,
    size_px: int = SIZE_PX,
    dots: Sequence[int] = (4, 60) * 6,
    striped: Collection[int] = (),
    stained: Collection[int] = (),
) -> Path:
    """Write twelve slides of two classes: pink noise, with dark dots in those that are malignant.

    ``dots``: number of each slide's dots; ``striped``: slides that have stripes; ``stained``: those whose
    two stains were measured.
    """
    store = folder / "store"
    store.mkdir(parents=True)
    for number, split in enumerate(SPLITS):
        label = ("benign", "malignant")[number % 2]
        stains = STAINS if number in stained else None
        _write_slide(store, f"slide-{number:02d}", number, dots[number], number in striped, size_px, stains)
        extra = {"label": label, "case_id": f"case-{number:02d}", "split": split}
        SlideRecord(
            slide_id=f"slide-{number:02d}",
            source_path=f"slide-{number:02d}.tiff",
            status="done",
            source_mpp=0.5,
            store_mpp=1.0,
            height_px=size_px,
            width_px=size_px,
            tissue_fraction=0.9,
            bad_tiles=0,
            extra=extra,
        ).save(store)
    merge_manifest(store)
    return store


def _write_slide(
    store: Path, slide_id: str, seed: int, dots: int, striped: bool, size_px: int, stains: dict[str, Any] | None
) -> None:
    rng = np.random.default_rng(seed)
    base = np.array([225, 160, 200], np.float64)[:, None, None]
    pixels = base + rng.normal(0, 12, (3, size_px, size_px))
    if striped:
        pixels[:, np.arange(size_px) % 16 < 8] -= np.array([20, 90, 10])[:, None, None]
    for y, x in rng.integers(0, size_px - 8, (dots, 2)):
        pixels[:, y : y + 8, x : x + 8] -= np.array([120, 110, 60])[:, None, None]
    image = np.clip(pixels, 0, 255).astype(np.uint8)
    with SlideWriter(store, slide_id, pyramid_levels([LevelSize(size_px, size_px)], 1.0)) as writer:
        writer.write(0, 0, 0, image)
        mask = np.ones((size_px // 8, size_px // 8), bool)
        mask[:2] = False
        writer.write_tissue(mask, mpp_um=8.0)
        scanned = {"height_px": size_px * 2, "width_px": size_px * 2, "downsample": [1.0, 1.0]}
        source = {
            "vendor": "generic-tiff",
            "mpp": [0.5, 0.5],
            "mpp_from": "file",
            "bounds": {"y0": 0, "y1": size_px * 2, "x0": 0, "x1": size_px * 2},
            "levels": [scanned],
        }
        facts: dict[str, Any] = {
            "stains": stains,
            "mpp": 1.0,
            "kind": "resampled",
            "sha256": f"{seed:02x}" * 32,
            "source": source,
        }
        affine = [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
        writer.publish({**facts, "affine": affine, "parameters": {"tissue": {"threshold": 0.05}}})


def make_config(folder: Path, store: Path, **sections: dict[str, Any]) -> Path:
    """Write the YAML of a short run of a tiny network; ``sections`` go over its keys."""
    tree: dict[str, dict[str, Any]] = {
        "data": {"store": str(store), "size_px": SIZE_PX, "align_px": 32, "batch_size": 2, "class_weights": "balanced"},
        "model": {"name": "tests.workflows.faults:faulty"},
        "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9, "max_norm": 5.0},
        "lr_schedule": {"name": "cosine", "warmup_steps": 2},
        "validation": {"every_steps": 3},
        "run": {"dir": str(folder / "run"), "steps": 6, "seed": 3, "tensorboard": False},
    }
    return write_config(folder, tree, sections)


def write_config(folder: Path, tree: dict[str, dict[str, Any]], sections: Mapping[str, dict[str, Any]]) -> Path:
    """Write the YAML of a run; the keys of ``sections`` go over those of ``tree``."""
    merged = {name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree | dict(sections)}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merged))
    return path
