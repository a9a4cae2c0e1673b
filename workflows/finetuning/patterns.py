"""Patterns that choose parameters of a model by name, as in ``layer1`` or ``*.bias``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hyfi_core.errors import RequestError
from workflows.console import listed

_SHOWN = 12
"""Largest number of modules that a message names."""


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern matches a parameter, or a module that contains it.

    ::

        pattern      encoder.layer1.0.weight   head.weight
        encoder      yes                       no
        enc*.layer1  yes                       no
        *.weight     yes                       yes

    Args:
        name: The dotted name of a parameter.
        pattern: As of ``fnmatch``; ``*`` also matches dots.
    """
    parts = name.split(".")
    # fnmatchcase: fnmatch ignores case on some systems.
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def check_matches(key: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    """Check that each pattern chooses a parameter.

    Args:
        key: The key of the YAML that has the patterns.
        patterns: The patterns.
        names: All parameters of the model.

    Raises:
        RequestError: A pattern chooses none; the message has similar names.
    """
    names = list(names)
    modules = _modules(names)
    for pattern in patterns:
        if any(matches(name, pattern) for name in names):
            continue
        alike = difflib.get_close_matches(pattern, [*modules, *names], n=3, cutoff=0.5)
        top = [module for module in modules if "." not in module]
        advice = f"did you mean {' or '.join(alike)}? " if alike else ""
        raise RequestError(
            f"{key}: {pattern!r} matches no parameter of the model; {advice}its modules are "
            f"{listed(top, _SHOWN)} (patterns such as layer1, encoder.blocks.0 or *.bias)"
        )


def _modules(names: Iterable[str]) -> list[str]:
    """Return the modules that contain parameters, outer ones first, in the order of the model."""
    paths: dict[str, None] = {}
    for name in names:
        parts = name.split(".")[:-1]
        paths |= {".".join(parts[:end]): None for end in range(1, len(parts) + 1)}
    # Stable: modules of one level stay in the order of the model.
    return sorted(paths, key=lambda path: path.count("."))
