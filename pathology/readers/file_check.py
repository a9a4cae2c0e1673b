"""Checks of a file before a reader opens it, for clear messages about files that no reader can open."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from data.location import is_remote
from pathology.errors import SlideError
from pathology.readers.dicom.contradictions import level_contradiction
from pathology.readers.dicom.files import read_header, series_files, series_in
from pathology.readers.facts.header_budget import check_directories, first_directory
from pathology.readers.ngff.groups import is_ome_zarr, read_group

_LARGEST_SLIDEDAT_BYTES = 2**20
_LISTED_FILES = 10

_TO_OME = "Bio-Formats (`bfconvert`) or QuPath makes an OME-TIFF of it"
UNREAD_FORMATS = {
    ".vsi": ("it is a slide of Olympus cellSens or VS", _TO_OME),
    ".ets": ("it has the pixels of an Olympus .vsi, one folder up", f"{_TO_OME}, from the .vsi"),
    ".isyntax": ("it is a slide of Philips IntelliSite", "libisyntax (`isyntax-to-tiff`) or isyntax2raw converts it"),
    ".sdpc": ("it is a slide of SQRAY", "the scanner's own software exports SVS or TIFF"),
    ".ozx": ("it is an OME-Zarr store in a ZIP archive", "`unzip` makes a folder of it, which is read"),
    ".kfb": ("it is a slide of KFBIO", "KFBIO's converter makes SVS or TIFF of it"),
}
"""Formats that no reader here opens: what a file is, and what converts it."""

UNREADABLE_FOLDER = "the folder cannot be searched for slides"
"""Start of the reason recorded for a folder that cannot be searched."""


def check_file(path: Path) -> None:
    """Check a file's type, size and first bytes.

    Raises:
        SlideError: The file has an unsupported format, is missing, unreadable or empty; is a PNG, JPEG or PDF with the
            extension of a slide; an MRXS without its folder or a file in it; a TIFF that is truncated before its
            directory or lists more tiles than a slide has; or a DICOM slide whose frames have wrong positions.
    """
    if is_ome_zarr(path):
        return
    if is_remote(path):
        raise SlideError("there is no OME-Zarr store at this address; other slides are read from a disk only")
    if path.suffix.lower() in UNREAD_FORMATS and path.is_file():
        format_name, converter = UNREAD_FORMATS[path.suffix.lower()]
        raise SlideError(f"{format_name}, which is not read; {converter}")
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait forever
            raise SlideError(_folder_problem(path) if path.is_dir() else "it is not a regular file")
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
        _check_mrxs_folder(path)
    directory_at = first_directory(head)  # None: not a TIFF
    if directory_at is not None and directory_at >= size:
        raise SlideError(
            f"the file is truncated: its directory should be at byte {directory_at}, but it has {size} bytes"
        )
    if directory_at is not None:
        check_directories(path)
    _check_dicom_positions(path)


def _check_dicom_positions(path: Path) -> None:
    """Refuse a DICOM slide with a level whose frames have wrong positions."""
    try:
        header = read_header(path)
        files = series_files(path) if header is not None and header.whole_slide else []
    except OSError:
        return  # the reader will report it
    for file in files:
        if contradiction := level_contradiction(file):
            raise SlideError(f"{file.name}: {contradiction}; its pixels would be missing or at wrong places")


def folder_error(path: Path) -> OSError | None:
    """Return the error of listing a folder; None if it can be listed."""
    try:
        os.scandir(path).close()
    except OSError as error:
        return error
    return None


def _folder_problem(path: Path) -> str:
    """Return why a folder is not a slide."""
    error = folder_error(path)
    if error:
        return f"{UNREADABLE_FOLDER}: {error.strerror}"
    if read_group(path) is not None:
        return "it is a zarr group without images of OME-Zarr (`multiscales`)"
    slides = [file.name for file in series_in(path).values()]
    if slides:
        names = ", ".join(slides[:_LISTED_FILES])
        return f"it is a folder of {len(slides)} DICOM slides; name one file of each: {names}"
    return "it is a folder, not a slide file"


def _check_mrxs_folder(path: Path) -> None:
    """Check that the files named in an MRXS's Slidedat.ini exist, which OpenSlide notices only when it reads a tile."""
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
    except (OSError, ValueError):  # ValueError: the name in the file is not valid as a path
        return True
    return False
