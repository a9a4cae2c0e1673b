"""Dtype and memory format of models, and how a ``model.json`` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from data.loading.normalise import Normalisation
from hyfi_core.errors import RequestError
from hyfi_core.memory_overlap import overlapping
from hyfi_core.models.by_name import unused_keys
from workflows.config.data import ModelConfig
from workflows.console import listed
from workflows.encoders.timm_encoder import normalisation_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Dtype of weights and images for each ``run.precision``; with bfloat16, autocast computes in that dtype."""
_NAMED = 5
"""Largest number of modules that a message names."""
_PREFIXES = ("", "pixel_", "image_")
"""Of names of means and standard deviations of pixels."""
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def convert_model(model: nn.Module, precision: str, memory_format: str) -> nn.Module:
    """Convert ``model`` in place to the dtype of a precision, and its 4-d weights to a memory format; return it."""
    model.to(DTYPES[precision])
    for parameter in model.parameters():
        if parameter.dim() == 4:
            # Only 4-d weights: channels_last is a format of (N, C, H, W) alone. `.data`, so that the parameter object
            # stays.
            parameter.data = parameter.data.contiguous(memory_format=FORMATS[memory_format])
    return model


def convert_to_train(model: nn.Module, precision: str, memory_format: str) -> nn.Module:
    """Convert ``model`` in place to a precision and a memory format, as `convert_model`, to be trained; return it.

    Raises:
        RequestError: Two parameters to train are different tensors in the same memory. A conversion or a GPU would
            separate them, and the result would depend on it.
    """
    named = dict(model.named_parameters())
    for first, second in overlapping({name: p for name, p in named.items() if p.requires_grad}):
        # The first pair is enough.
        raise RequestError(
            f"{first!r} and {second!r} of the model are different tensors in the same memory, as after "
            f"p.data = q.data, and would be trained apart; tie them as one tensor (module.weight = other.weight)"
        )
    return convert_model(model, precision, memory_format)


def set_training(model: nn.Module) -> str | None:
    """Prepare the modes of a new model for training, in place; return a line for the user if modules are in evaluation.

    Every module keeps the mode in which its factory returned it, such as a frozen backbone in evaluation mode. But if
    nothing in the model is in training mode, as after ``from_pretrained`` of many libraries, all of it is set to
    training.
    """
    evaluated = {name: part for name, part in model.named_modules() if not part.training}
    if not evaluated:
        return None
    # A container says True even if all of its layers were set to evaluation one by one.
    if not any(part.training and _has_mode(part) for part in model.modules()):
        model.train()
        return (
            "the model's factory returned it in evaluation mode: all of it is set to training mode "
            "(to keep modules in evaluation mode, let the factory return the others in training mode)"
        )
    # Only the outermost modules: their parts are in evaluation mode with them.
    outermost = [name for name in evaluated if name.rpartition(".")[0] not in evaluated or not name]
    shown = listed(outermost, _NAMED)
    count = f"{len(evaluated)} module{'s' * (len(evaluated) > 1)}"
    return (
        f"{count} of the model {'stay' if len(evaluated) > 1 else 'stays'} in evaluation mode, as the factory returned "
        f"{'them' if len(evaluated) > 1 else 'it'} (no dropout, batch norm with fixed statistics): {shown}"
    )


def unused_settings(model: Mapping[str, Any]) -> str | None:
    """Return a line for the user if ``norm`` or ``pool`` of a ``model.json``'s ``model`` do nothing in its factory."""
    unused = unused_keys(model)
    if not unused:
        return None
    keys = " and ".join(f"model.{key}: {model[key]}" for key in unused)
    verb, names = "have" if len(unused) > 1 else "has", " or ".join(unused)
    return f"{keys} {verb} no effect: {model['name']} has no parameter {names}"


def other_normalisation(model: nn.Module, config: ModelConfig) -> str | None:
    """Return a line for the user if no means are set, and a network of timm states others, or normalises by itself."""
    if config.mean is not None or config.std is not None:
        return None
    for name, module in model.named_modules():
        # As a module Normalize in front of a network, or its buffers.
        if all(any(_is_by_channel(module, prefix + key) for prefix in _PREFIXES) for key in ("mean", "std")):
            return (
                f"the model gets pixels that are normalised with ImageNet's mean and std, and {name or 'it'} "
                f"({type(module).__name__}) has a mean and a std of its own: if its forward normalises, set "
                f"model.mean: [0, 0, 0] and model.std: [1, 1, 1]"
            )
    # The factory may have put the network into a module of its own.
    stated = next(filter(None, map(normalisation_of, model.modules())), None)
    if stated is None or stated == Normalisation():  # ImageNet's
        return None
    return (
        f"model.mean and model.std are not set, so pixels are normalised with ImageNet's; timm's configuration of the "
        f"network states others: set model.mean: {list(stated.mean)} and model.std: {list(stated.std)} for its weights"
    )


def _is_by_channel(module: nn.Module, key: str) -> bool:
    """Whether an attribute of a module is a number for each of red, green and blue."""
    value = getattr(module, key, None)
    return (
        value.numel() == 3 if isinstance(value, torch.Tensor) else isinstance(value, list | tuple) and len(value) == 3
    )


def _has_mode(module: nn.Module) -> bool:
    """Whether a module does more than hold others: the mode of a container says nothing about its layers."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(tensors) or next(module.children(), None) is None


def model_fields(config: ModelConfig, classes: int) -> dict[str, Any]:
    """Return the ``model`` of a ``model.json``, from the section ``model`` of a configuration."""
    return {
        "name": config.name,
        "classes": classes,
        "norm": config.norm,
        "pool": config.pool,
        "options": config.options,
    }
