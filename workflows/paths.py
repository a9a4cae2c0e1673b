"""Checks of the paths that a command reads or writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from data.location import address_of
from hyfi_core.errors import RequestError

_READ_BYTES = 2**16


def require_writable(target: Path) -> None:
    """Check that ``target``, a file or a folder, can be created or written; leaves nothing behind.

    Raises:
        RequestError: A parent of the path is a file, no file can be created in its nearest existing folder, or the path
            is not valid.
    """
    _check_accessible(target)
    folder = target if target.is_dir() else target.parent
    # The nearest folder that exists: the missing ones will be made in it.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise RequestError(f"{target}: cannot be written: {folder} is a file, not a folder; choose another path")
    try:
        # Tried, because rights alone do not tell what a quota or a file server allows.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise RequestError(
            f"{target}: cannot be written: no files can be created in {folder.absolute()} ({reason}); choose another "
            f"path"
        ) from None


def require_writable_file(target: Path) -> None:
    """Check that ``target`` can be written as a file; leaves nothing behind.

    Raises:
        RequestError: It is a folder, or as `require_writable`.
    """
    require_writable(target)
    if target.is_dir():
        raise RequestError(f"{target} is a folder; give the name of a file")


def require_replaceable(target: Path, is_own: Callable[[bytes], bool], kind: str) -> None:
    """Check that ``target`` can be written as a file, and that a file that is there is an earlier output.

    Args:
        target: The path.
        is_own: Whether the first 64 KiB of a file that is there are those of an output of this kind.
        kind: What the command writes, for the message.

    Raises:
        RequestError: It is something else, such as the input, and would be lost; or as `require_writable_file`.
    """
    require_writable_file(target)
    if not target.is_file():  # nothing, or a device
        return
    try:
        with target.open("rb") as file:
            start = file.read(_READ_BYTES)
    except OSError as error:
        raise RequestError(f"{target}: exists and cannot be read ({error.strerror}); choose another path") from None
    if start and not is_own(start):
        raise RequestError(f"{target} exists and is not {kind}: it would be lost; choose another path")


def require_readable(path: Path, advice: str) -> None:
    """Check that a local file or folder exists and can be read.

    Args:
        path: The path.
        advice: What to give instead of a path that does not exist.

    Raises:
        RequestError: It does not exist, or this user may not read or enter it.
    """
    try:
        path.stat()
        if path.is_dir():
            # Opening is enough to see whether it may be listed; nothing is read.
            os.scandir(path).close()
            (path / "zarr.json").exists()  # raises if the folder may be listed but not entered
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError(f"{path}: no such file or folder; {advice}") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error


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


def require_local(path: Path, subject: str) -> None:
    """Check that a path is not an address of object storage.

    Args:
        path: The path, as given.
        subject: What it is, for messages.

    Raises:
        RequestError: It is an address.
    """
    address = address_of(path)
    if address is not None:
        raise RequestError(f"{subject} {address}: only stores are read from object storage; copy it to a local folder")


def _check_accessible(target: Path) -> None:
    """Check that a path can be accessed.

    Raises:
        RequestError: It cannot: it is a URL, its name is too long, or access to a folder is denied.
    """
    address = address_of(target)
    if address is not None:
        raise RequestError(
            f"{address}: only a store (hyfi ingest --out) can be written to object storage; "
            f"write to a local folder, and copy it there afterwards"
        )
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{str(target)[:200]}: cannot be accessed ({reason}); choose another path") from None
