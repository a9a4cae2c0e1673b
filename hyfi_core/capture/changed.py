"""Attributes of PyTorch's that are another for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

PATCHING = threading.RLock()
"""Held while something of PyTorch's is another: two threads that changed it at once would not give it back."""


@contextlib.contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class, a module or an object for a while, if it is there.

    A class that only inherits it inherits it again afterwards.
    """
    if not hasattr(holder, name):
        yield
        return
    inherited = isinstance(holder, type) and name not in vars(holder)
    # What a class holds under the name: asked for by attribute, a class method would come bound.
    before = vars(holder).get(name) if isinstance(holder, type) else getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
