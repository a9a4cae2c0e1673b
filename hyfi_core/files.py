"""Durable writes of files and directories."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = -100
"""``AT_FDCWD``: relative paths are below the working folder, as in all other calls."""
_EXCHANGE = 2
"""``RENAME_EXCHANGE`` of renameat2(2)."""
_NOT_OFFERED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}
"""Errors if a file system, kernel or sandbox lacks ``renameat2``; a plain rename would raise all others, too."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that sets ``path`` as the file of an ``OSError`` without one, as writing and syncing raise it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # with a file but no number, its text is not shown
            error.filename = str(path)
        raise


def sync_file(path: Path) -> None:
    """Flush a file's or folder's content to disk."""
    # A folder can be opened for reading only, and ``fsync`` accepts that for files, too.
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):  # an error of fsync has no file
            os.fsync(handle)
    finally:
        os.close(handle)


def swap_directory(prepared: Path, final: Path, aside: Path) -> None:
    """Rename a finished directory to its final name; an older one is moved ``aside`` and then removed.

    On Linux both directories exchange their names in one step, so that ``final`` always names a whole directory. On
    file systems without that (NFS) and on other platforms, there is a moment between two renames in which ``final``
    does not exist: a process that then starts renames ``aside`` back to it.
    """
    if os.path.lexists(final):
        # An earlier process may have been killed before it removed ``aside``.
        _remove(aside)
        if _exchanged(prepared, final):
            # `prepared` names the older directory now. It is renamed before it is removed file by file: after a crash
            # during that, a later writer would otherwise continue in what is left under `prepared`.
            prepared.rename(aside)
        else:
            # Two renames, because rename(2) replaces only an empty folder.
            final.rename(aside)
            prepared.rename(final)
    else:
        prepared.rename(final)
    # The new name is an entry of the parent folder, so that folder is synced.
    sync_file(final.parent)
    _remove(aside)


def _remove(folder: Path) -> None:
    """Remove a folder, or a link to one, as far as that is possible; missing is fine."""
    if folder.is_symlink():  # what it points to is not ours
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two directories in one step; return False, with nothing changed, if that is impossible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def replaced_name(folder: Path) -> Path:
    """Return the hidden sibling to which `swap_directory` moves an older checkpoint aside.

    Always the same: a reader that finds no ``folder`` knows where the older one is.
    """
    return folder.parent / f".{folder.name}.old"


def temporary_name(folder: Path, name: str | None = None) -> Path:
    """Return the hidden sibling under which a file, folder or link is made before it is renamed to ``folder``.

    Args:
        folder: final name.
        name: part of the hidden name, equal in all processes that write to it; None: a new random one.
    """
    return folder.parent / f".{folder.name}.tmp-{name or uuid.uuid4().hex[:8]}"
