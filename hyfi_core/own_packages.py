"""Modules of the user that have the name of one of our packages: the message says which file hides the other."""

from __future__ import annotations

import importlib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("data", "pathology", "workflows", "hyfi_core")


def check_not_hidden(package: str) -> None:
    """Check that a package of ours is found under its name, and not a module of the user.

    Raises:
        ImportError: a file or folder of the user comes first on the module search path; the message names it.
    """
    module = importlib.import_module(package)
    places = [Path(place).resolve() for place in (module.__file__, *getattr(module, "__path__", ())) if place]
    if not any(place.is_relative_to(_ROOT / package) for place in places):
        raise ImportError(
            f"{places[0] if places else package} hides the package {package!r} of hyfi ({_ROOT / package}): rename it, "
            f"or start Python in another folder (python -P keeps the current one off the module search path)",
            name=package,
        )


def describe_hidden(error: BaseException, folder: Path) -> str | None:
    """Return why an import in the user's code failed if it named a package of ours instead of the user's; else None.

    Args:
        error: raised by the import; an ``ImportError``, or an ``AttributeError`` of a module, if this is the reason.
        folder: folder in which the user's own module of that name would be.
    """
    name = error.name if isinstance(error, ImportError) else ""
    if isinstance(error, AttributeError):
        name = getattr(error.obj, "__name__", "")
    package = str(name).partition(".")[0]
    if package not in _PACKAGES:
        return None
    own = next((path for path in (folder / package, folder / f"{package}.py") if path.exists()), None)
    mine = f"your {own}" if own is not None else f"a module of yours named {package!r}"
    return f"{package!r} is a package of hyfi ({_ROOT / package}), not {mine}; rename yours"
