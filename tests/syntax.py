"""The syntax trees of the code, which many tests look through."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file, read once in a process; all trees together are large: clear the cache afterwards."""
    return ast.parse(path.read_text(encoding="utf-8"))
