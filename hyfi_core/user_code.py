"""Functions and classes of the user, named ``package.module:attribute`` in a configuration."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hyfi_core.errors import RequestError
from hyfi_core.own_packages import describe_hidden


def load_user_code(key: str, name: str, what: str) -> Callable[..., Any]:
    """Import what a configuration names; modules are also searched in the working folder, as with ``python -m``.

    Args:
        key: The key of the configuration, for messages.
        name: ``package.module:attribute``.
        what: Noun phrase for messages, such as "a function that makes a model".

    Raises:
        RequestError: The module cannot be imported, or has no such function or class.
    """
    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        # Appended last: a file of the user must not hide a library of the same name.
        sys.path.append(str(Path.cwd()))
    module = _imported(f"{key} {name!r}", module_name)
    try:
        value = getattr(module, attribute)
    except AttributeError:
        raise RequestError(f"{key} {name!r}: {module_name} has no {attribute!r}") from None
    if not callable(value):
        raise RequestError(f"{key} {name!r}: {attribute} is not {what}")
    return value  # type: ignore[no-any-return]


def _imported(label: str, module_name: str) -> ModuleType:
    """Import a user's module; ``label`` begins the message: the key that names it, and its value.

    Raises:
        RequestError: it cannot be imported; the message says why, if that is known.
    """
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # SystemExit: a script that reads its own arguments
        hidden = describe_hidden(error, Path.cwd())
        if hidden is not None:
            raise RequestError(f"{label}: {error}; {hidden}") from error
        # Only if the module itself or a package around it is missing, not a module that it imports.
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise RequestError(f"{label}: {error}; is its folder on PYTHONPATH?") from error
        raise RequestError(f"{label}: importing {module_name} failed{_place(error)}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return (
            f"it ends the program (exit code {error.code}); put what a script does under `if __name__ == '__main__':`"
        )
    return f"{type(error).__name__}: {error}"


def _place(error: BaseException) -> str:
    """Return the last line outside of libraries that an error of an import comes from, as text."""
    if isinstance(error, SyntaxError):
        return f" in {error.filename}, line {error.lineno}"
    paths = sysconfig.get_paths()
    libraries = (*(paths[name] for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    return f" in {frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].line})" if frames else ""
