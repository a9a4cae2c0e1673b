"""Staging: a temporary copy of a slide on a local disk, made with large reads.

```
CACHE/hyfi-stage-HOST-PID-xxxx/slide.mrxs        the copy; for formats of several files, all of them
                              /slide/Data0000.dat
```

The folder of a killed process is removed by the next one that stages on the same host.
"""

from __future__ import annotations

import configparser
import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.files import is_running
from data.location import is_remote
from pathology.errors import SlideError
from pathology.readers.dicom.files import may_be_dicom, series_files

_BLOCK_BYTES = 16 * 2**20
_SPARE_BYTES = 2**30
"""Bytes that stay free on the local disk for other processes."""
_PREFIX = "hyfi-stage-"


@contextmanager
def staged(source: Path, cache: Path, spare_bytes: int = _SPARE_BYTES) -> Iterator[Path]:
    """Context that yields the path of a local copy of a slide, or of the slide itself if it does not fit or is remote.

    Args:
        source: The slide.
        cache: A folder on a local disk; created if it does not exist.
        spare_bytes: Bytes that must stay free there.

    Raises:
        SlideError: The slide cannot be read, or changed during the copy.
        OSError: The folder cannot be written for a reason other than a full disk.
    """
    if is_remote(source):
        yield source
        return
    cache.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(cache)
    try:
        files = files_of(source)
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise SlideError(f"the file cannot be read: {error.strerror}") from error
    # If other processes fill the disk during the copy, `_copy_all` returns False, and the slide itself is read.
    if shutil.disk_usage(cache).free < size + spare_bytes:
        yield source
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-", dir=cache))
    try:
        yield folder / source.name if _copy_all(files, source.parent, folder) else source
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def files_of(source: Path) -> list[Path]:
    """Return all files of a slide, first ``source`` itself.

    An MRXS has a folder of the same name; VMS and VMU files list the others; the levels of a DICOM slide are the files
    of one series; an OME-Zarr store is a folder.

    Raises:
        OSError: The folder or the list of names cannot be read.
    """
    suffix = source.suffix.lower()
    if source.is_dir():
        return sorted(path for path in source.rglob("*") if path.is_file())
    if suffix == ".mrxs":
        folder = source.with_suffix("")
        return [source, *sorted(path for path in folder.rglob("*") if path.is_file())]
    if suffix in (".vms", ".vmu"):
        return [source, *_files_listed_in(source)]
    if may_be_dicom(source):
        return series_files(source)
    return [source]


def _files_listed_in(index: Path) -> list[Path]:
    """Return the files beside a VMS or VMU file whose names are values in it."""
    # These files repeat keys and contain "%", which the default settings refuse.
    parser = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
    try:
        parser.read_string(index.read_text(encoding="utf-8-sig", errors="replace"))
    except configparser.Error:
        return []  # the reader reports the error
    values = {value for section in parser.sections() for value in parser[section].values() if value}
    bare_names = sorted(value for value in values if Path(value).name == value)
    return [index.parent / name for name in bare_names if (index.parent / name).is_file() and name != index.name]


def _copy_all(files: list[Path], root: Path, folder: Path) -> bool:
    """Copy all files; if the disk becomes full, remove the copies and return False."""
    try:
        for file in files:
            _copy(file, folder / file.relative_to(root))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    """Copy a file; refuse it if it has changed meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SlideError(f"the file cannot be read: {error.strerror}") from error
    try:
        before = os.fstat(handle)
        with target.open("xb") as file:
            offset = 0
            while data := _block(handle, offset):
                file.write(data)
                offset += len(data)
        after = source.stat()
    finally:
        os.close(handle)
    # ``after`` is by name: a file that was replaced differs from the open one.
    if (offset, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise SlideError("the file changed while it was copied; ingest it again")


def _block(handle: int, offset: int) -> bytes:
    try:
        return os.pread(handle, _BLOCK_BYTES, offset)
    except OSError as error:
        raise SlideError(f"the file cannot be read: {error.strerror}") from error


def _remove_left_behind(cache: Path) -> None:
    """Remove the folders of processes of this host that have ended."""
    mine = re.compile(rf"{re.escape(_PREFIX + socket.gethostname())}-(\d+)-")
    for folder in cache.glob(f"{_PREFIX}*"):
        match = mine.match(folder.name)
        if match is not None and not is_running(int(match[1])):
            shutil.rmtree(folder, ignore_errors=True)
