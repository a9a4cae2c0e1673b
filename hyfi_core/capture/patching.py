"""Temporary replacement of attributes of PyTorch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def traced_where(traces: Callable[[], bool]) -> Iterator[None]:
    """Context in which PyTorch's flags of a trace, which hold for all threads, hold only where ``traces`` is true.

    In another thread, an optimizer would take its step count for a traced one, and compute corrections in float32; its
    ``zero_grad`` would annotate the trace, and restore what it had found, at times after the trace's end.
    """

    def limited(flag: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: traces() and flag()

    with (
        patched(torch.compiler, "is_compiling", limited(torch.compiler.is_compiling)),
        patched(torch.compiler, "is_exporting", limited(torch.compiler.is_exporting)),
    ):
        yield


def traced_here() -> contextlib.AbstractContextManager[None]:
    """Context in which PyTorch's flags of a trace hold in this thread only."""
    here = threading.get_ident()
    return traced_where(lambda: threading.get_ident() == here)
