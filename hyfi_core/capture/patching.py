"""Temporary replacement of attributes of PyTorch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

PATCHING = threading.RLock()
"""Held while PyTorch is patched: two threads patching at the same time would not restore the original."""


@contextlib.contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Context that replaces an attribute of a class, a module or an object, if it exists.

    An inherited attribute is inherited again afterwards.
    """
    if not hasattr(holder, name):
        yield
        return
    inherited = isinstance(holder, type) and name not in vars(holder)
    # From the class's own dict: getattr would return a bound class method.
    before = vars(holder).get(name) if isinstance(holder, type) else getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


def traced_here() -> contextlib.AbstractContextManager[None]:
    """Context in which ``torch.compiler.is_compiling`` is true in this thread only, not in all.

    In another thread, an optimizer would take its step count for a traced one, and compute corrections in float32.
    """
    here, is_compiling = threading.get_ident(), torch.compiler.is_compiling
    return patched(torch.compiler, "is_compiling", lambda: threading.get_ident() == here and is_compiling())
