"""Evaluation mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module, device: torch.device, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards every module gets its own flag back.

    Args:
        model: any.
        device: where it is.
        autocast: type in which operators compute where autocast would; None: their own.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.autocast(device.type, autocast) if autocast is not None else contextlib.nullcontext():
            yield
    finally:
        for module, flag in flags:
            module.training = flag
