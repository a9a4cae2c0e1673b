"""Evaluation of checkpoints with tiles or features, on a group of ranks that share the tiles of each slide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from data.loading.normalise import Normalisation
from data.samples.dataset import SlideDataset
from data.tiles.bags import Bags, TileBags
from data.tiles.case_bags import grouped
from data.tiles.grouping import Grouping
from data.tiles.tiling import Tiling
from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.checkpoint import read_model_json
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.parallelize_tiles import parallelize_tiles
from workflows.evaluation.evaluate import EvaluationSet
from workflows.evaluation.evaluator import Evaluator
from workflows.evaluation.feature_models import CHUNK, feature_bags_of, feature_module_of, is_feature_model
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
    module, _ = build_tile_model(model["model"], int(model["tiles"]["size_px"]), normalisation=normalisation)
    convert_model(module, model.get("precision", "float32"), model.get("memory_format", "channels_last"))
    return module


def bag_module_of(model: Mapping[str, Any]) -> TileModel:
    """Return the module of a ``model.json`` of tiles or features, with arbitrary weights, in the run's precision.

    Raises:
        RequestError: It cannot be built.
    """
    return feature_module_of(model) if is_feature_model(model) else tile_module_of(model)


def is_bag_model(model: Mapping[str, Any]) -> bool:
    """Whether a ``model.json`` is of an encoder of tiles, or of an aggregator of features."""
    return is_tile_model(model) or is_feature_model(model)


def bag_evaluator(
    model: Mapping[str, Any], bags: Bags, group: Communicator, plan: ParallelPlan, device: torch.device
) -> Evaluator:
    """Return the evaluator of a ``model.json`` on bags (collective); see `Evaluator`.

    Args:
        model: Content of ``model.json``.
        bags: The slides.
        group: The ranks.
        plan: How the ranks share slides and tiles.
        device: Device of this rank.

    Raises:
        RequestError: On every rank: one of them cannot build the model.
    """
    # One rank alone may lack a factory or a library: agree before the engine's first message, or the others wait.
    module = agree(group, lambda: bag_module_of(model).to(device))
    autocast = torch.bfloat16 if model.get("precision") == "bfloat16" else None
    chunk: int | Literal["auto"] = CHUNK if is_feature_model(model) else "auto"
    engine = parallelize_tiles(module.encoder, module.aggregator, plan, group, autocast=autocast, chunk=chunk)
    aggregate = model.get("case_aggregate", "mean")
    slide_count = len(bags.dataset) if model.get("bag") == "case" else None  # stated if a sample is a case
    slides = EvaluationSet.of(AllTiles(bags), bags.samples, task_of(model), aggregate, slide_count)
    return Evaluator(slides, TileInference(engine), module, plan, group)


def bags_of(model: Mapping[str, Any], dataset: SlideDataset, features: Path | None) -> Bags | None:
    """Return the slides of a dataset as a ``model.json`` takes them; None if it takes images.

    Args:
        model: Content of ``model.json``.
        dataset: The slides.
        features: Folder of ``--features``; None: not given.

    Raises:
        RequestError: A slide has no tile with enough tissue, features cannot be used or are not needed, or slides of
            a case that is one bag have different labels.
    """
    # The samples: slides, or cases with the slides of each.
    samples = Grouping.of(dataset.samples, model.get("bag", "slide"))
    if is_feature_model(model):
        return grouped(feature_bags_of(model, dataset, features), samples)
    refuse_features(model, features)
    if not is_tile_model(model):
        return None
    bags = TileBags(dataset, tiling_of(model))
    bags.check()
    return grouped(bags, samples)


def refuse_features(model: Mapping[str, Any], features: Path | None) -> None:
    """Refuse ``--features`` for a ``model.json`` that reads pixels.

    Raises:
        RequestError: It is given.
    """
    if features is not None and not is_feature_model(model):
        raise RequestError(
            f"--features {features}: the model reads pixels, not features; leave it out, or give a checkpoint of a run "
            f"with data.features"
        )


def cells_of(
    checkpoints: Sequence[Path], cells: str | None, memory: str | None, spill: str | None, image: str
) -> Cells:
    """Return the cells of an evaluation; None without cells, and for bags, which are never divided.

    Args:
        checkpoints: The model, or the models of an ensemble.
        cells: Value of ``--cells``.
        memory: Value of ``--memory``; with bags, it limits the chunks of tiles, not cells.
        spill: Value of ``--spill``.
        image: Value of ``--image``; ``whole``, the default, is what bags always do.

    Raises:
        RequestError: A checkpoint is not on a disk, or options do not fit together or have no meaning for bags.
    """
    for checkpoint in checkpoints:
        require_local(checkpoint, "checkpoint")
    models = [read_model_json(checkpoint) for checkpoint in checkpoints]
    # If any model of an ensemble takes bags, the options are refused: they would mean nothing for it.
    if not any(map(is_bag_model, models)):
        return parse_cells(cells, memory, spill)
    model_kind = "features" if any(map(is_feature_model, models)) else "an encoder of tiles"
    options = {"--cells": cells, "--spill": spill, "--image": None if image == "whole" else image}
    for option, value in options.items():
        if value is not None:
            raise RequestError(
                f"{option} {value}: has no meaning for {model_kind}, computed chunk by chunk over all tissue; leave it "
                "out (--memory 8GB limits the memory)"
            )
    return None
