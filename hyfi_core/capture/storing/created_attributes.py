"""Attributes that a forward creates on its module, which ``torch.export`` of torch 2.9 does not allow."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from hyfi_core.capture.patching import patched

_DETECTS = "_detect_attribute_assignment"


def created_attributes_allowed() -> contextlib.AbstractContextManager[None]:
    """Context in which ``torch.export`` does not see attributes that the forward has created on the model.

    Some versions of PyTorch refuse these. Here, ``trace_guards`` decides what a forward may store.
    """
    # PyTorch's own check of attributes, a private function: a version of PyTorch that lacks it refuses nothing.
    module = importlib.import_module("torch.export._trace")
    detected: Any = getattr(module, _DETECTS, None)

    @contextlib.contextmanager
    def of_created(model: nn.Module) -> Iterator[None]:
        """PyTorch's context that checks attributes, during which the model has created ones; it does not see them."""
        before, created = set(vars(model)), {}
        with detected(model):
            try:
                yield
            finally:
                # Taken away before PyTorch's check, which runs at the end of this context, and put back after it.
                for name in vars(model).keys() - before:
                    created[name] = vars(model).pop(name)
        vars(model).update(created)

    return patched(module, _DETECTS, of_created)
