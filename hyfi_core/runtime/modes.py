"""Modes for a while: evaluation, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def autocasting(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which operators compute in ``dtype`` where autocast would; None: in their own types."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


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
        with autocasting(device, autocast):
            yield
    finally:
        for module, flag in flags:
            module.training = flag
