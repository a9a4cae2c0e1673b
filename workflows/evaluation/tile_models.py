"""Encoder and aggregator of a run with ``data.tiles``, as its ``model.json`` describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.loading.normalise import Normalisation
from hyfi_core.models.aggregators.by_name import build_aggregator
from hyfi_core.tiles.model import TileModel
from workflows.config.data import ModelConfig
from workflows.encoders.load import load_encoder
from workflows.encoders.lora import add_lora
from workflows.encoders.tile_encoder import TileEncoder
from workflows.encoders.trained_part import lora_rank
from workflows.encoders.transformers_encoder import architecture_of


class NormalisedTiles:
    """Hook of an encoder that normalises the tiles of each call; a hook, so that parameters keep their names.

    Args:
        normalisation: Means and standard deviations, of values from 0 to 1.
    """

    def __init__(self, normalisation: Normalisation) -> None:
        self._mean, self._std = (
            # No buffers: they would be in the encoder's state_dict, and names of weights would differ from the
            # factory's.
            torch.tensor(values, dtype=torch.float64).view(3, 1, 1)
            for values in (normalisation.mean, normalisation.std)
        )

    def __call__(self, encoder: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the arguments with normalised tiles."""
        tiles, *more_args = args
        mean, std = (values.to(tiles.device, tiles.dtype) for values in (self._mean, self._std))
        return ((tiles - mean) / std, *more_args)


def tile_model_fields(config: ModelConfig, outputs: int) -> dict[str, Any]:
    """Return the ``model`` of a ``model.json``, from the section ``model`` of a configuration with tiles."""
    encoder, aggregator = config.encoder, config.aggregator
    assert encoder is not None, "checked with the configuration"
    assert aggregator is not None, "resolved with the configuration"
    return {
        "name": f"{encoder.name}, {aggregator.name}",
        "classes": outputs,
        "encoder": {"name": encoder.name, "options": encoder.options, "lora": lora_rank(encoder.train)},
        "aggregator": {"name": aggregator.name, "options": aggregator.options},
    }


def with_architecture(fields: dict[str, Any], encoder: TileEncoder) -> dict[str, Any]:
    """Return the ``model`` of a ``model.json`` that needs no folder of transformers to build the encoder again."""
    if not encoder.name.startswith("transformers:"):
        return fields
    return fields | {"encoder": fields["encoder"] | {"architecture": architecture_of(encoder.module)}}


def is_tile_model(model: Mapping[str, Any]) -> bool:
    """Whether a ``model.json`` is of an encoder of tiles."""
    return bool(model.get("tiles"))


def build_tile_model(
    fields: Mapping[str, Any], tile_px: int, weights: Path | None = None, normalisation: Normalisation | None = None
) -> tuple[TileModel, TileEncoder]:
    """Return the module that the ``model`` of a ``model.json`` with tiles describes, and its encoder as it was loaded.

    The encoder of the module takes tiles of 0 to 1, which it normalises, and returns vectors.

    Args:
        fields: From `tile_model_fields`.
        tile_px: Height and width of a tile.
        weights: File of the encoder's weights; None: those of its folder or factory, or random ones.
        normalisation: Normalisation of tiles; None: that of the encoder.

    Raises:
        RequestError: Encoder or aggregator cannot be built.
    """
    encoder, aggregator = fields["encoder"], fields["aggregator"]
    loaded = load_encoder(
        encoder["name"],
        weights,
        size_px=tile_px,
        options=encoder["options"],
        mean=None if normalisation is None else normalisation.mean,
        std=None if normalisation is None else normalisation.std,
        architecture=encoder.get("architecture"),
    )
    # After loading: files name weights as in an encoder without LoRA.
    if encoder.get("lora") is not None:
        add_lora(loaded.module, int(encoder["lora"]))
    head = build_aggregator(aggregator["name"], loaded.features, int(fields["classes"]), aggregator["options"])
    # Hooks of the module itself: a wrapper would put a prefix before all names.
    loaded.module.register_forward_pre_hook(NormalisedTiles(loaded.normalisation))
    if loaded.output is not None:
        loaded.module.register_forward_hook(_picked(loaded))
    return TileModel(loaded.module, head), loaded


def _picked(encoder: TileEncoder) -> Callable[[nn.Module, Any, Any], torch.Tensor]:
    """Return a hook that picks the vectors out of what the encoder returns."""
    return lambda module, args, returned: encoder.vectors(returned)
