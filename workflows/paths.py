"""Checks of the paths that a command writes to."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from hyfi_core.errors import RequestError

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def require_writable(target: Path) -> None:
    """Check that ``target``, a file or a folder, can be created or written; leaves nothing behind.

    Raises:
        RequestError: A part of the path is a file, no file can be created in its nearest existing folder, or the path
            is not valid.
    """
    _check_accessible(target)
    folder = target if target.is_dir() else target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise RequestError(f"{target}: cannot be written: {folder} is a file, not a folder; choose another path")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise RequestError(
            f"{target}: cannot be written: no files can be created in {folder.absolute()} ({reason}); choose another "
            f"path"
        ) from None


def require_folder(target: Path, purpose: str) -> None:
    """Check that ``target`` is a folder or can become one.

    Args:
        target: The path.
        purpose: Purpose of the folder, for messages.

    Raises:
        RequestError: It is a file, or not a valid path.
    """
    _check_accessible(target)
    if target.exists() and not target.is_dir():
        raise RequestError(f"{target} is a file; choose a folder for {purpose}")


def require_local(path: Path, what: str) -> None:
    """Check that a path is not an address of object storage.

    Args:
        path: The path, as given.
        what: What it is, for messages.

    Raises:
        RequestError: It is an address.
    """
    address = _ADDRESS.match(str(path))
    if address is not None:
        raise RequestError(
            f"{what} {address[1]}://{str(path)[address.end() :]}: only stores are read from object storage; copy it "
            f"to a local folder"
        )


def _check_accessible(target: Path) -> None:
    """Check that a path can be accessed.

    Raises:
        RequestError: It cannot: it is a URL, its name is too long, or access to a folder is denied.
    """
    address = _ADDRESS.match(str(target))
    if address is not None:
        raise RequestError(
            f"{address[1]}://{str(target)[address.end() :]}: only a store (hyfi ingest --out) can be written to object "
            f"storage; write to a local folder, and copy it there afterwards"
        )
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{str(target)[:200]}: cannot be accessed ({reason}); choose another path") from None
