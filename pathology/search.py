"""Search for slides: the kind of thing at a path given by the user, and the slides in a folder or at an address."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from data.files import as_on_disk
from data.location import each, is_remote, location
from data.store.manifest import read_user_manifest
from hyfi_core.errors import RequestError
from pathology.readers.dicom.files import DicomHeader, file_of_slide, may_be_dicom, read_header
from pathology.readers.file_check import UNREAD_FORMATS
from pathology.readers.ngff.groups import is_ome_zarr
from pathology.readers.sources import SLIDE_SUFFIXES


def is_gone(path: Path) -> bool:
    """Whether the file no longer exists; inaccessible ones may still exist."""
    try:
        if is_remote(path):
            return not path.exists()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def slides_at(path: Path, store: Path | None) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield the slides of an argument: a slide, a folder or a manifest; each with its row of the manifest.

    Args:
        path: From `data.location.location`.
        store: The store that is written, whose own slides are left out; None: there is none.

    Raises:
        RequestError: There is nothing at the path, no slide in it, or the manifest is invalid.
    """
    if is_remote(path):
        yield from ((source, {}) for source in _remote_slides(path))
        return
    path = as_on_disk(path)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
        if is_folder:
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError(f"{path}: no such file or folder") from error
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error
    if is_folder and is_ome_zarr(path):
        yield _tidy(path), {}
    elif is_folder:
        sources = sorted(_search(path, store))
        if not sources:
            suffixes = ", ".join(sorted(SLIDE_SUFFIXES))
            raise RequestError(
                f"{path}: no slide in this folder or below; slides are OME-Zarr stores, and files ending in {suffixes}"
            )
        yield from ((source, {}) for source in sources)
    elif path.suffix.lower() in {".csv", ".tsv"}:
        for row in read_user_manifest(path):
            _check_encodable(path, row["source_path"], row.get("slide_id", ""))
            source = location(row["source_path"])
            yield source if is_remote(source) else file_of_slide(_tidy(source)), row
    else:
        yield _tidy(path), {}


def _check_encodable(manifest: Path, *names: str) -> None:
    """Check that names of a manifest can be names of files: Python may have a narrow encoding, as with ``LC_ALL=C``.

    Raises:
        RequestError: One cannot.
    """
    try:
        for name in names:
            os.fsencode(name)
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{manifest}: {name}: names of files are in {error.encoding} here, which lacks "
            f"{error.object[error.start]!r}; set PYTHONUTF8=1 (or LC_ALL=C.UTF-8) in the environment"
        ) from error


def header_or_none(source: Path) -> DicomHeader | None:
    """Return the header of a DICOM file; None for other files, and for those that cannot be read."""
    if not may_be_dicom(source):
        return None
    with suppress(OSError):
        return read_header(source)
    return None  # the reader reports the error


def _is_slide(source: Path) -> bool:
    """Whether a file of a folder is a slide, or one of a scanner whose format is not read, which fails by name."""
    header, suffix = header_or_none(source), source.suffix.lower()
    if header is not None:
        return header.whole_slide
    return suffix in SLIDE_SUFFIXES or (suffix in UNREAD_FORMATS and suffix != ".ets")


def _tidy(path: Path) -> Path:
    """Return the absolute path without ``.`` and ``..``, without resolving links, so that each file has one path."""
    tidy = Path(os.path.normpath(as_on_disk(path.absolute())))
    # After a link to a folder, `..` is the parent of the link's target: the path without it may be another file.
    try:
        return tidy if tidy.samefile(path) else path.absolute()
    except OSError:  # the reader reports the error
        return tidy if is_gone(path) else path.absolute()


def _remote_slides(path: Path) -> list[Path]:
    """Return the OME-Zarr stores at an address, or directly below it; other files are not read from there.

    Raises:
        RequestError: There is none, or the server cannot be reached.
    """
    try:
        if is_ome_zarr(path):
            return [path]
        # Not every server lists what is below an address.
        below = sorted(path.iterdir()) if getattr(path, "can_list", False) else []
        # `each`: many requests at a time.
        slides = [source for source, is_slide in zip(below, each(is_ome_zarr, below, path), strict=True) if is_slide]
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not slides:
        raise RequestError(
            f"{path}: no OME-Zarr store at this address or directly below; slides of other formats are read from a "
            f"disk only: copy them first"
        )
    return slides


def _search(folder: Path, store: Path | None) -> Iterator[Path]:
    """Yield slides, and folders that cannot be searched, which fail like unreadable slides.

    Stores of `hyfi ingest` that are below are left out: their slides are copies. So is the store that is written.
    """
    visited: set[str] = set()
    unreadable: list[Path] = []

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed in the meantime
            unreadable.append(Path(error.filename))

    # Links are followed, so a folder may be met again, or contain itself. Real paths ensure that it is visited once.
    for folder_path, folders, files in os.walk(_tidy(folder), onerror=note, followlinks=True):
        real = os.path.realpath(folder_path)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        if _is_zarr(folder_path, files):
            folders.clear()
            if is_ome_zarr(Path(folder_path)):
                yield Path(folder_path)
            continue
        # A store of `hyfi ingest` has its records in this folder.
        if ".records" in folders and (len(visited) > 1 or _is_same(folder_path, store)):
            folders[:] = [name for name in folders if not name.endswith(".zarr")]
        # Changed in place, because `os.walk` descends into the folders that remain in this list.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith(".") and _is_slide(Path(folder_path, name)):
                yield Path(folder_path, name)
    yield from unreadable


def _is_zarr(folder: str, files: Sequence[str]) -> bool:
    """Whether a folder is a group or an array of zarr, or named like one; its own folders are not searched."""
    return folder.endswith(".zarr") or not {"zarr.json", ".zgroup", ".zattrs", ".zarray"}.isdisjoint(files)


def _is_same(folder: str, store: Path | None) -> bool:
    """Whether a folder is the store, by whatever path; False without one."""
    return store is not None and not is_remote(store) and store.exists() and store.samefile(folder)
