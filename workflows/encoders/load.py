"""Loading of encoders by name, from local files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.loading.normalise import Normalisation
from hyfi_core.capture.verify import Output
from hyfi_core.errors import RequestError
from hyfi_core.models.construct import construct
from workflows.console import listed
from workflows.encoders.tile_encoder import TileEncoder
from workflows.encoders.timm_encoder import normalisation_of, timm_module
from workflows.encoders.transformers_encoder import module_of, normalisation_in, pooled, transformers_module
from workflows.finetuning.weights import load_weights

_SAMPLE_TILES = 2


def load_encoder(
    name: str,
    weights: Path | None = None,
    *,
    size_px: int = 224,
    options: Mapping[str, Any] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    allow_download: bool = False,
    architecture: Mapping[str, Any] | None = None,
) -> TileEncoder:
    """Return an encoder of tiles in evaluation mode, on the CPU, in float32.

    Args:
        name: ``timm:NAME`` or ``timm:FOLDER``, ``transformers:FOLDER``, or ``package.module:factory``.
        weights: A local ``.safetensors`` or ``.pth`` file. Default: those of the folder, or of the user's factory.
        size_px: Height and width of tiles; the encoder is tried with this size.
        options: Arguments of the model.
        mean: Means of red, green and blue in 0 … 1; default: as the encoder's own configuration states, or ImageNet's.
        std: Standard deviations of red, green and blue; default: as for ``mean``.
        allow_download: Whether timm and transformers may download weights.
        architecture: Architecture of a transformers encoder, from `architecture_of`: it is then built without its
            folder, with random weights.

    Raises:
        RequestError: There is no such encoder, its files belong to another one, it does not take tiles of this size, or
            it does not return a vector for each.
    """
    kind, _, encoder_name = name.partition(":")
    if not kind or not encoder_name:
        raise RequestError(
            f"encoder {name!r}: use timm:NAME or timm:FOLDER, transformers:FOLDER, or package.module:factory"
        )
    output: Output | None = None
    untrained: tuple[str, ...] = ()
    if kind == "timm":
        module, source = timm_module(encoder_name, options or {}, weights is None, allow_download)
    elif architecture is not None:
        module, source, output = module_of(architecture), "", pooled  # no source: weights are random
    elif kind == "transformers":
        module, source, untrained = transformers_module(encoder_name, options or {}, weights is None, allow_download)
        output = pooled
    else:
        module = construct("encoder", name, path=name, needed={}, options=options or {})
        source = "as its factory returns them"
    if weights is not None:
        source, untrained = _load(name, module, weights)
    elif not source:
        source, untrained = "random", tuple(module.state_dict())
    normalisation, origin = _normalisation(kind, encoder_name, module, mean, std)
    # A checkpoint in half precision would otherwise compute in it; a user asks for that with autocast.
    module.float().eval()
    unknown = 0  # the length of vectors, before the trial
    encoder = TileEncoder(name, module, output, unknown, normalisation, origin, source, untrained)
    return replace(encoder, features=_features(encoder, size_px))


def _load(name: str, module: nn.Module, weights: Path) -> tuple[str, tuple[str, ...]]:
    """Load a file into a module; return the source of the weights as text, and the tensors that the file lacks."""
    try:
        report = load_weights(module, weights)
    except RequestError as error:
        raise RequestError(f"encoder {name}: {str(error).removeprefix('model.')}") from error
    unused = f", not used: {listed(report.unexpected)}" if report.unexpected else ""
    return f"{weights} ({len(report.loaded)} tensors{report.source}{unused})", (*report.missing, *report.reshaped)


def _normalisation(
    kind: str, encoder_name: str, module: nn.Module, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[Normalisation, str]:
    """Return (normalisation, its source as text): as asked for, as the encoder states, or ImageNet's."""
    if (mean is None) != (std is None):
        raise RequestError("mean and std of the encoder: give both, or none")
    if mean is not None and std is not None:
        if len(mean) != 3 or len(std) != 3 or not all(0 <= m <= 1 for m in mean) or not all(s > 0 for s in std):
            raise RequestError(
                f"mean {list(mean)} and std {list(std)} of the encoder: give three numbers each, means from 0 to 1 and "
                f"standard deviations above 0"
            )
        return Normalisation.from_json({"mean": mean, "std": std}), "as asked for"
    stated = normalisation_in(encoder_name) if kind == "transformers" else normalisation_of(module)
    if stated is not None:
        return stated, "preprocessor_config.json" if kind == "transformers" else "timm's configuration"
    return Normalisation(), "ImageNet's: the encoder states none"


def _features(encoder: TileEncoder, size_px: int) -> int:
    """Return the length of a vector, after a trial with tiles of this size.

    Raises:
        RequestError: The encoder does not take such tiles, or does not return one vector for each.
    """
    try:
        # Two tiles: with one, a mean over the batch would look right.
        vectors = encoder.encode(torch.zeros(_SAMPLE_TILES, 3, size_px, size_px, dtype=torch.uint8))
    except RequestError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(
            f"encoder {encoder.name}: it does not take tiles of {size_px} × {size_px} px ({reason}); use the size that "
            f"it was trained with, or, with timm, the option dynamic_img_size: true"
        ) from error
    if len(vectors) != _SAMPLE_TILES:
        raise RequestError(
            f"encoder {encoder.name}: it returned {tuple(vectors.shape)} for {_SAMPLE_TILES} tiles; it must return one "
            f"vector for each"
        )
    return int(vectors.shape[1])
