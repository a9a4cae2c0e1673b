"""Files that must outlive a crash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync_file(path: Path) -> None:
    """Return when the file's or the folder's content has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap_directory(prepared: Path, final: Path, aside: Path) -> None:
    """Rename a finished directory to its name; an older one is moved ``aside`` first and removed in the end."""
    if final.exists():
        final.rename(aside)
    prepared.rename(final)
    sync_file(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
