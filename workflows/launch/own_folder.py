"""A temporary folder for one launcher, which is removed even if the launcher is killed.

A launcher locks its folder; the kernel releases the lock when the process ends, for any reason. The next launcher of
the same user removes the folders that are not locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "hyfi-launch-"


@contextmanager
def own_folder(parent: Path | None = None) -> Iterator[Path]:
    """Context with a new folder for this process alone, which is removed at the end.

    Args:
        parent: Folder in which to make it; None: the system's folder for temporary files.

    Raises:
        OSError: It cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    created = _new_folder(parent)
    # Between making and locking, another launcher may take the folder for abandoned, and remove it.
    while created is None:
        created = _new_folder(parent)
    folder, lock = created
    try:
        yield folder
    finally:
        # Before the lock is released: an unlocked folder may be removed by others at the same time.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _new_folder(parent: Path) -> tuple[Path, int] | None:
    """Return a new folder and its lock; None if another launcher took it for abandoned before it was locked."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.stat().st_ino == os.fstat(lock).st_ino:  # else it was removed, and another has its name
            return folder, lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:  # no locks on this disk: others cannot lock it either, and leave it alone
        return folder, lock
    os.close(lock)
    return None


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's launchers that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                continue
            # O_NOFOLLOW: if a link has taken the name since `lstat`, what it points to must not be emptied.
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # Raises if a running launcher has the lock; its folder then stays.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
