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
"""Errors of file systems, kernels and sandboxes without it; any other would come from a plain rename, too."""


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
    """Rename a finished directory to its final name; an older one is moved ``aside`` and then removed.

    On Linux both change places in one step, so that ``final`` always names a whole directory. File systems without
    that (NFS) and other platforms have a moment between two renames, in which the older one has the name ``aside``
    alone: a process that starts then and finds no ``final`` renames ``aside`` back to it.
    """
    if os.path.lexists(final):
        # One of an earlier process that was killed before it had removed it.
        _remove(aside)
        if _exchanged(prepared, final):
            # `prepared` names the older one now. Removing takes many steps, so it first gets another name: after a
            # crash in between, a later writer would continue in what is left under `prepared`.
            prepared.rename(aside)
        else:
            # rename(2) replaces an empty folder only.
            final.rename(aside)
            prepared.rename(final)
    else:
        prepared.rename(final)
    # The new name is an entry of the parent, which is synced by itself.
    sync_file(final.parent)
    _remove(aside)


def _remove(folder: Path) -> None:
    """Remove a folder, or a link to one, as far as that is possible; missing is fine."""
    if folder.is_symlink():  # what it points to is not ours
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two directories in one step; False, and nothing changed, where that is not offered."""
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
        name: by which all who write it know it; None: a new one.
    """
    return folder.parent / f".{folder.name}.tmp-{name or uuid.uuid4().hex[:8]}"
