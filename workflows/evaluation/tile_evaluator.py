"""Evaluation of checkpoints with an encoder of tiles, on a group of ranks that share the tiles of each slide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.loading.normalise import Normalisation
from data.samples.dataset import SlideDataset
from data.tiles.bags import TileBags
from data.tiles.tiling import Tiling
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.checkpoint import read_model_json
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.parallelize_tiles import parallelize_tiles
from workflows.evaluation.evaluate import EvaluationSet
from workflows.evaluation.evaluator import Evaluator
from workflows.evaluation.models import convert_model
from workflows.evaluation.tile_models import build_tile_model, is_tile_model
from workflows.evaluation.tile_slides import AllTiles, TileInference
from workflows.option_values import Cells, parse_cells
from workflows.paths import require_local
from workflows.tasks.by_name import task_of


def tiling_of(model: Mapping[str, Any]) -> Tiling:
    """Return how the slides of a ``model.json`` are divided into tiles."""
    tiles = model["tiles"]
    return Tiling(int(tiles["size_px"]), int(tiles["stride_px"]), float(model["mpp"]), float(tiles["min_tissue"]))


def tile_module_of(model: Mapping[str, Any]) -> TileModel:
    """Return the encoder and aggregator of a ``model.json``, with arbitrary weights, in the run's precision.

    Raises:
        RequestError: They cannot be built.
    """
    normalisation = Normalisation.from_json(model["normalisation"])
    module, _ = build_tile_model(model["model"], int(model["tiles"]["size_px"]), None, normalisation)
    convert_model(module, model.get("precision", "float32"), model.get("memory_format", "channels_last"))
    return module


def tile_evaluator(
    model: Mapping[str, Any], bags: TileBags, group: Communicator, memory_bytes: int | None, device: torch.device
) -> Evaluator:
    """Return what evaluates weights of a ``model.json`` on slides (collective); see `Evaluator`.

    Args:
        model: Content of ``model.json``.
        bags: The slides.
        group: The ranks, which share the tiles of each slide.
        memory_bytes: Memory limit of a rank; None: no limit.
        device: Of this rank.

    Raises:
        RequestError: The model cannot be built.
    """
    module = tile_module_of(model).to(device)
    plan = ParallelPlan(tiles=group.size, memory_bytes=memory_bytes)
    autocast = torch.bfloat16 if model.get("precision") == "bfloat16" else None
    engine = parallelize_tiles(module.encoder, module.aggregator, plan, group, autocast=autocast)
    aggregate = model.get("case_aggregate", "mean")
    slides = EvaluationSet.of(AllTiles(bags), bags.dataset.samples, task_of(model), aggregate)
    return Evaluator(slides, TileInference(engine), module, plan, group)


def tile_bags_of(model: Mapping[str, Any], dataset: SlideDataset) -> TileBags:
    """Return the slides of a dataset as bags of the tiles that a ``model.json`` describes.

    Raises:
        RequestError: A slide has no tile with enough tissue.
    """
    bags = TileBags(dataset, tiling_of(model))
    bags.check()
    return bags


def cells_of(
    checkpoints: Sequence[Path], cells: str | None, memory: str | None, spill: str | None, image: str
) -> Cells:
    """Return the cells of an evaluation; with encoders of tiles there are none, and ``--memory`` needs no ``--spill``.

    Raises:
        RequestError: A checkpoint is not on a disk, or options do not fit together or have no meaning for encoders
            of tiles.
    """
    for checkpoint in checkpoints:
        require_local(checkpoint, "checkpoint")
    if not any(is_tile_model(read_model_json(checkpoint)) for checkpoint in checkpoints):
        return parse_cells(cells, memory, spill)
    options = {"--cells": cells, "--spill": spill, "--image": None if image == "whole" else image}
    for option, value in options.items():
        if value is not None:
            raise RequestError(
                f"{option} {value}: has no meaning for an encoder of tiles, which is computed chunk by chunk over all "
                f"tissue; leave it out (--memory 8GB limits its memory)"
            )
    return None
