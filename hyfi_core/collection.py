"""Pauses of Python's garbage collection during work that creates many objects, such as the import of PyTorch."""

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

    Whenever enough new objects exist, the collector goes through all objects of the process, including PyTorch's. That
    would take a third of a capture's time and free nothing. Garbage is collected after the context.

    Contexts may be nested, and several threads may use them at once: when the last one ends, collection is switched on
    if it was on before.
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
    """Keep the garbage collector out of the import of PyTorch and of the end of this process; not for a library.

    The collector would go through PyTorch's hundreds of thousands of objects several times while they are created, and
    once more at the end. That is a quarter of the processor time of a process that only imports what a rank needs.
    """
    # Frozen objects are not collected at the end. Exit handlers run in reverse order, so this one comes last.
    atexit.register(gc.freeze)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _PausedImport())


class _PausedImport(MetaPathFinder):
    """Finds PyTorch as the other finders do, and pauses garbage collection while it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of PyTorch, whose loader pauses garbage collection; None for all other modules."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)  # so that the other finders find it now
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_paused(module: ModuleType) -> None:
            with collection_paused():
                execute(module)
            # PyTorch's objects live as long as the process; frozen, they are skipped by later collections.
            gc.freeze()

        spec.loader.exec_module = execute_paused  # type: ignore[method-assign]
        return spec
