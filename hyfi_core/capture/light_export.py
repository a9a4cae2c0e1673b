"""Exports without what nobody looks at: as fast as they can be made without another result.

``torch.export`` spends much of its time, for a large model, on things beside the graph: tables looked up anew, code
that nobody runs, where in the program each node came from. Here is what is left out, and what is done instead. Every
part looks first whether this PyTorch has what it changes, and else changes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from hyfi_core.capture.changed import changed
from hyfi_core.capture.export_code import code_when_run
from hyfi_core.capture.export_tables import remembered_tables

_YOUNG_OBJECTS = 50_000
"""New objects between two collections; an export makes millions that live until its end."""


@contextlib.contextmanager
def light_export() -> Iterator[None]:
    """Make exports cheaper for a while. It changes classes of PyTorch's: one thread at a time."""
    with (
        remembered_tables(),
        code_when_run(),
        _no_stack_traces(),
        _shared_origins(),
        _no_search_for_nothing(),
        _quick_call_names(),
        _rare_collections(),
    ):
        yield


@contextlib.contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Let no node of a graph say from which line of the user's program it came."""
    settings: Any = getattr(torch.fx, "config", None)
    with changed(settings, "do_not_emit_stack_traces", True):
        yield


@contextlib.contextmanager
def _shared_origins() -> Iterator[None]:
    """Let nodes share what says from which nodes of earlier graphs they came; else each has a deep copy of its own."""
    from torch.fx import traceback

    origin: Any = getattr(traceback, "NodeSource", None)
    if origin is None or "__deepcopy__" in vars(origin):
        yield
        return
    origin.__deepcopy__ = lambda self, memo: self
    try:
        yield
    finally:
        del origin.__deepcopy__


@contextlib.contextmanager
def _no_search_for_nothing() -> Iterator[None]:
    """Do not look through every value's sizes for symbols out of a set that is empty: there are none."""
    from torch.fx.experimental import symbolic_shapes

    name = "_free_unbacked_symbols_with_path"
    plain: Any = getattr(symbolic_shapes, name, None)

    def look(*given: Any, **named: Any) -> Any:
        pending = named.get("pending")
        return {} if pending is not None and not pending else plain(*given, **named)

    with changed(symbolic_shapes, name, look):
        yield


@contextlib.contextmanager
def _quick_call_names() -> Iterator[None]:
    """Ask a pattern whether ``layer@2`` is a later call of ``layer`` only where the name begins so.

    Each parameter of a block is compared with the names of all blocks of its stage.
    """
    unflatten = importlib.import_module("torch.export.unflatten")  # a function has the same name
    plain: Any = getattr(unflatten, "_is_call_name", None)

    def is_call(call_name: str, base: str) -> bool:
        return call_name == base or (call_name.startswith(base) and bool(plain(call_name, base)))

    with changed(unflatten, "_is_call_name", is_call):
        yield


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage less often."""
    before = gc.get_threshold()
    if before[0]:  # nought: never
        gc.set_threshold(max(before[0], _YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
