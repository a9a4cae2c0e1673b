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
    """Context in which ``torch.export`` does not see attributes that the forward has created.

    With any version of PyTorch, the guards decide what a forward may store.
    """
    # Private: where a version of PyTorch lacks it, nothing is refused.
    module = importlib.import_module("torch.export._trace")
    detected: Any = getattr(module, _DETECTS, None)

    @contextlib.contextmanager
    def of_created(model: nn.Module) -> Iterator[None]:
        before, created = set(vars(model)), {}
        with detected(model):
            try:
                yield
            finally:
                for name in vars(model).keys() - before:
                    created[name] = vars(model).pop(name)
        vars(model).update(created)

    return patched(module, _DETECTS, of_created)
