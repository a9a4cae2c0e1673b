"""Durable writes of files and directories."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which an ``OSError`` without a file, as writing and syncing raise it, gets ``path`` for its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # without a number, the text would be lost
            error.filename = str(path)
        raise


def sync_file(path: Path) -> None:
    """Flush a file's or folder's content to disk."""
    # A folder can be opened for reading only, and ``fsync`` accepts that for files, too.
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def swap_directory(prepared: Path, final: Path, aside: Path) -> None:
    """Rename a finished directory to its final name; an older one is first moved ``aside`` and then removed."""
    if final.exists():
        # rename(2) replaces an empty folder only.
        final.rename(aside)
    prepared.rename(final)
    # The new name is an entry of the parent, which is synced by itself.
    sync_file(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def temporary_name(folder: Path, name: str | None = None) -> Path:
    """Return the hidden sibling under which a file, folder or link is made before it is renamed to ``folder``.

    Args:
        folder: final name.
        name: by which all who write it know it; None: a new one.
    """
    return folder.parent / f".{folder.name}.tmp-{name or uuid.uuid4().hex[:8]}"
