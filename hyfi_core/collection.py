"""Pauses of Python's garbage collection during work that makes many objects, such as the import of PyTorch."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LOCK = threading.Lock()
_pauses = 0
_was_on = True


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Context without automatic garbage collection.

    Whenever enough new objects have been made, the collector goes through all objects of the process, PyTorch's too.
    That would take a third of a capture's time and free nothing. Garbage is collected after the context.

    Contexts may be nested, and several threads may have one: the last to end switches collection on, if it was on
    before.
    """
    global _pauses, _was_on
    with _LOCK:
        if not _pauses:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _LOCK:
            _pauses -= 1
            if not _pauses and _was_on:
                gc.enable()


def start_quickly() -> None:
    """Keep the garbage collector out of the import of PyTorch and of the end of this process; for programs.

    The collector would go through PyTorch's hundred thousands of objects several times while they are made, and once
    more at the end: a quarter of the processor time of a process that imports what a rank needs, and ends.
    """
    # Frozen objects are not collected at the end. Exit handlers run in reverse order, so this one comes last.
    atexit.register(gc.freeze)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _PausedImport())


class _PausedImport(MetaPathFinder):
    """Finds PyTorch where it is, and pauses garbage collection while it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of PyTorch; None for all other modules."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)  # the others find it
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_paused(module: ModuleType) -> None:
            with collection_paused():
                execute(module)
            # What PyTorch has made lives as long as the process: later collections leave it alone.
            gc.freeze()

        spec.loader.exec_module = execute_paused  # type: ignore[method-assign]
        return spec
