"""Tables of an exported program's signature, made once instead of at every look.

``ExportGraphSignature`` goes through all inputs each time that somebody asks for a table of them, and a decomposition
asks for one at every node, a check for another at every buffer: time in the square of the operators, over half of the
capture of a ResNet-1001.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.export.graph_signature import ExportGraphSignature

_TABLES = ("parameters", "buffers", "inputs_to_parameters", "inputs_to_buffers", "buffers_to_mutate")


@contextlib.contextmanager
def remembered_tables() -> Iterator[None]:
    """Let signatures remember their tables for a while.

    Names change one at a time through ``replace_all_uses``, which has all forgotten, or all of them at once, which is
    seen by the first and the last. Where this PyTorch has no such tables, nothing is changed. It changes a class of
    PyTorch's: one thread at a time.
    """
    tables = [name for name in _TABLES if isinstance(vars(ExportGraphSignature).get(name), property)]
    if "replace_all_uses" not in vars(ExportGraphSignature):
        yield
        return
    made: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    before = {name: vars(ExportGraphSignature)[name] for name in (*tables, "replace_all_uses")}

    def table(name: str) -> property:
        def look(signature: Any) -> Any:
            key = (name, id(signature), *_ends(signature.input_specs), *_ends(signature.output_specs))
            if key not in made:
                made[key] = (signature, before[name].fget(signature))  # with the signature: its id is not used again
            return made[key][1]

        return property(look)

    def replace_all_uses(signature: Any, old: str, new: str) -> Any:
        made.clear()
        rename: Callable[..., Any] = before["replace_all_uses"]
        return rename(signature, old, new)

    changed: dict[str, Any] = {name: table(name) for name in tables} | {"replace_all_uses": replace_all_uses}
    for name, ours in changed.items():
        setattr(ExportGraphSignature, name, ours)
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(ExportGraphSignature, name, plain)


def _ends(specs: list[Any]) -> tuple[Any, ...]:
    """Return how many specifications there are, and the names of the first and the last."""
    return (len(specs), *(getattr(spec.arg, "name", None) for spec in (*specs[:1], *specs[-1:])))
