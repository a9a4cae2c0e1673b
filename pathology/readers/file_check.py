"""What is wrong with a file that no reader will open, in plain words."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pathology.errors import SlideError
from pathology.readers.dicom_files import series_in

_LARGEST_SLIDEDAT_BYTES = 2**20
_MOST_NAMED = 10


CLOSED_FOLDER = "the folder cannot be searched for slides"
"""Begins the reason of a folder that fails in place of the slides that may lie in it."""


def check_file(path: Path) -> None:
    """Look at a file's size and first bytes.

    Raises:
        SlideError: The file is missing, unreadable, empty, another kind of picture, an MRXS whose folder or a file of
            it is missing, or a TIFF cut before its directory.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait forever
            raise SlideError(_of_folder(path) if path.is_dir() else "it is not a regular file")
        with path.open("rb") as file:
            head = file.read(16)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise SlideError(f"the file cannot be read: {error.strerror}") from error
    if size == 0:
        raise SlideError("the file is empty (0 bytes)")
    for magic, name in ((b"\x89PNG", "a PNG image"), (b"\xff\xd8\xff", "a JPEG image"), (b"%PDF", "a PDF")):
        if head.startswith(magic) and path.suffix.lower() in {".svs", ".tif", ".tiff"}:
            raise SlideError(f"the file is {name} with the extension of a slide")
    if path.suffix.lower() == ".mrxs":
        _check_folder(path)
    first = _first_directory(head)
    if first is not None and first >= size:
        raise SlideError(f"the file is truncated: its directory should be at byte {first}, but it has {size} bytes")


def closed_folder(path: Path) -> OSError | None:
    """Return why a folder cannot be searched; None where it can."""
    try:
        os.scandir(path).close()
    except OSError as error:
        return error
    return None


def _of_folder(path: Path) -> str:
    closed = closed_folder(path)
    if closed:
        return f"{CLOSED_FOLDER}: {closed.strerror}"
    several = [file.name for file in series_in(path).values()]
    if several:
        names = ", ".join(several[:_MOST_NAMED])
        return f"it is a folder of {len(several)} DICOM slides; name one file of each: {names}"
    return "it is a folder, not a slide file"


def _check_folder(path: Path) -> None:
    """Look for the files that an MRXS names; OpenSlide opens a data file only when a tile of it is asked for."""
    if path.suffix != ".mrxs":
        raise SlideError(f"OpenSlide needs the extension .mrxs, not {path.suffix}; rename the file")
    folder = path.with_suffix("")
    try:
        with (folder / "Slidedat.ini").open("rb") as file:
            text = file.read(_LARGEST_SLIDEDAT_BYTES).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        missing_folder = f"the folder {path.stem!r} beside it, with its Slidedat.ini and its pixels, is missing"
        raise SlideError(missing_folder) from error
    except OSError as error:
        raise SlideError(f"Slidedat.ini in its folder cannot be read: {error.strerror}") from error
    named = re.findall(r"^(?:FILE_\d+|INDEXFILE)[ \t]*=[ \t]*(.*?)[ \t\r]*$", text, re.MULTILINE)
    missing = [name for name in named if name and _is_missing(folder / name)]
    if missing:
        count = f" ({len(missing)} files are missing)" if len(missing) > 1 else ""
        raise SlideError(f"its Slidedat.ini names {missing[0]!r}, which is not in the folder {path.stem!r}{count}")


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (OSError, ValueError):  # names come from the file: some of them no disk takes
        return True
    return False


def _first_directory(head: bytes) -> int | None:
    """Return the offset of a TIFF's first directory; None for other files (TIFF 6.0, and BigTIFF with 43)."""
    order = {b"II": "little", b"MM": "big"}.get(head[:2])
    if order is None or len(head) < 16:
        return None
    version = int.from_bytes(head[2:4], "little" if order == "little" else "big")
    part = {42: head[4:8], 43: head[8:16]}.get(version)
    return None if part is None else int.from_bytes(part, "little" if order == "little" else "big")
