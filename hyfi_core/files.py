"""Files that must outlive a crash."""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Return when the file's or the folder's content has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
