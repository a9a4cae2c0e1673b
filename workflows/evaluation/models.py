"""Dtype and memory format of models, and how a ``model.json`` describes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workflows.config.data import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Dtype of weights and images for each ``run.precision``; with bfloat16, autocast computes in that dtype."""
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def convert_model(model: nn.Module, precision: str, memory_format: str) -> nn.Module:
    """Convert ``model`` in place to the dtype of a precision, and its 4-d weights to a memory format; return it."""
    model.to(DTYPES[precision])
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=FORMATS[memory_format])
    return model


def model_fields(config: ModelConfig, classes: int) -> dict[str, Any]:
    """Return the ``model`` of a ``model.json``, from the section ``model`` of a configuration."""
    return {
        "name": config.name,
        "classes": classes,
        "norm": config.norm,
        "pool": config.pool,
        "options": config.options,
    }
