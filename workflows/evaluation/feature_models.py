"""Aggregators of runs with ``data.features``, as their ``model.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from data.errors import StoreError
from data.samples.dataset import SlideDataset
from data.store.slide_store import SlideStore
from data.tiles.features.bags import FeatureBags
from hyfi_core.errors import RequestError
from hyfi_core.models.aggregators.by_name import build_aggregator
from hyfi_core.tiles.model import TileModel
from pathology.predict.inputs import SlideInput
from workflows.config.data import ModelConfig
from workflows.evaluation.models import convert_model
from workflows.features.feature_set import FeatureSet

CHUNK = 4096
"""Number of vectors read at once; each chunk opens the file again."""


def feature_model_fields(config: ModelConfig, features: int, outputs: int) -> dict[str, Any]:
    """Return the ``model`` of a ``model.json``, from the section ``model`` of a configuration with features."""
    aggregator = config.aggregator
    assert aggregator is not None, "resolved with the configuration"
    return {
        "name": f"features, {aggregator.name}",
        "classes": outputs,
        "features": features,
        "aggregator": {"name": aggregator.name, "options": aggregator.options},
    }


def is_feature_model(model: Mapping[str, Any]) -> bool:
    """Whether a ``model.json`` is of an aggregator of stored features."""
    return bool(model.get("features"))


def build_feature_model(fields: Mapping[str, Any]) -> TileModel:
    """Return the module that the ``model`` of a ``model.json`` with features describes, with random weights.

    Vectors are read as tiles ``(D, 1, 1)``, and the encoder only flattens them.

    Raises:
        RequestError: The aggregator cannot be built.
    """
    aggregator = fields["aggregator"]
    head = build_aggregator(aggregator["name"], int(fields["features"]), int(fields["classes"]), aggregator["options"])
    # (D, 1, 1) to (D): the encoder of tiles that are vectors already.
    return TileModel(nn.Flatten(), head)


def feature_module_of(model: Mapping[str, Any]) -> TileModel:
    """Return the aggregator of a ``model.json``, with arbitrary weights, in the run's precision."""
    module = build_feature_model(model["model"])
    convert_model(module, model.get("precision", "float32"), model.get("memory_format", "channels_last"))
    return module


def feature_bags_of(model: Mapping[str, Any], dataset: SlideDataset, folder: Path | None) -> FeatureBags:
    """Return the slides of a dataset as bags of features of the kind that a ``model.json`` states.

    Args:
        model: Content of ``model.json``.
        dataset: The slides.
        folder: Folder of the features, from ``--features``.

    Raises:
        RequestError: There is no folder, slides have no features in it, or features are damaged, of other slides or of
            another kind.
    """
    features = features_for(model, folder)
    bags = features.bags(dataset)
    features.check([bags])  # against the sidecars of `hyfi features`
    bags.check()  # against the slides
    features.check_like(model["features"], bags.sides_um())
    return bags


def with_reasons(slides: Sequence[SlideInput], features: FeatureSet) -> list[SlideInput]:
    """Return slides, with the reason why some cannot be predicted: missing, damaged or stale features.

    Args:
        slides: The slides to predict.
        features: Their features.
    """
    result = []
    for slide in slides:
        reason = slide.failure or _reason(slide, features)
        result.append(replace(slide, failure=reason) if reason else slide)
    return result


def _reason(slide: SlideInput, features: FeatureSet) -> str:
    """Return why a slide cannot be predicted from these features; empty if it can."""
    if slide.slide_id not in features.stored:
        why = features.failures.get(slide.slide_id)
        return f"no features of this slide in {features.folder}" + (f": {why}" if why else "")
    try:
        stored = SlideStore.open(slide.path, check_files=False) if slide.stored else None
    except StoreError:
        stored = None  # the prediction of the slide names the fault
    lack = features.fault(features.stored[slide.slide_id], stored)
    return "" if lack is None else f"its features in {features.folder} are {lack}"


def features_for(model: Mapping[str, Any], folder: Path | None) -> FeatureSet:
    """Open the folder of ``--features`` for a ``model.json``.

    Raises:
        RequestError: There is none, or it has features of another encoder.
    """
    stated = model["features"]
    if folder is None:
        encoder = f" of {stated['encoder']}" if stated["encoder"] else ""
        raise RequestError(
            f"the model was trained on features ({stated['length']} numbers{encoder}); give the folder with the "
            f"features of these slides, --features DIR"
        )
    features = FeatureSet.open(folder)
    features.check_like(stated, sides_um={})  # sizes of tiles are compared later, with the slides
    return features
