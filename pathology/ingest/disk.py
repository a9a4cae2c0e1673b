"""Room on the store's disk, and whose fault an error of the operating system is."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

LEAST_BYTES_PER_PX = 0.15
"""What a slide takes at the very least, pyramid included: mostly glass, zstd."""
RESERVE_BYTES = 64 * 2**20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


def free_bytes(folder: Path) -> int:
    """Return what may still be written into ``folder``, or into the nearest folder above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_room(store: Path, finest_px: int) -> None:
    """Check before a slide is written that its pixels may fit at all.

    Args:
        store: The store's folder.
        finest_px: Pixels of the slide's finest level.

    Raises:
        OSError: They cannot (`errno.ENOSPC`); says what is needed and what is free.
    """
    needed, free = int(finest_px * LEAST_BYTES_PER_PX) + RESERVE_BYTES, free_bytes(store)
    if needed > free:
        reason = f"no room: the next slide needs {needed / 1e9:.2f} GB or more, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, reason, str(store))


def is_stores_fault(error: OSError, store: Path) -> bool:
    """Whether an error is about the disk that is written to, not about the slide that is read."""
    if error.errno in _FULL:
        return True
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str)]
    root = str(store.absolute())
    return any(str(Path(name).absolute()).startswith(root) for name in names)
