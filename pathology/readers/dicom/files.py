"""The files of a folder that form one DICOM slide: those of one series (DICOM PS3.3 A.32.8, PS3.10 section 7).

```
SLIDE/1.dcm   level 0  \
      2.dcm   level 1   |  one series, one slide: OpenSlide opens any of them and finds the others
      3.dcm   label    /
      4.dcm   another series: another slide
      5.dcm   a CT image: no slide
```
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
_SOP_CLASS, _SERIES, _SERIES_NUMBER = 0x00020002, 0x0020000E, 0x00200011


@dataclass(frozen=True, slots=True)
class DicomHeader:
    """The series that a DICOM file belongs to.

    Attributes:
        whole_slide: Whether the file is part of a whole-slide image; True also if it is too damaged to tell.
        series: UID of its series; empty if the file has none or it cannot be read.
        number: Number of its series in the study; empty if the file has none or it cannot be read.
    """

    whole_slide: bool
    series: str
    number: str = ""


def read_header(path: Path) -> DicomHeader | None:
    """Return the header of a DICOM file; None for other files.

    Reads a few kilobytes. The result is cached until the file's size or time of modification changes.

    Raises:
        OSError: The file cannot be read.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        return None  # opening a pipe would block
    return _cached_header(str(path), state.st_size, state.st_mtime_ns)


def may_be_dicom(path: Path) -> bool:
    """Whether a file's name is one of DICOM: with its ending, with none, or a UID, which ends in a number."""
    suffix = path.suffix.lower()
    return suffix in (".dcm", ".dicom", "") or suffix[1:].isdecimal()


def series_files(path: Path) -> list[Path]:
    """Return the files of a DICOM slide: ``path``, then the others of its series in the folder, sorted by name.

    Raises:
        OSError: The folder or the file cannot be read.
    """
    own = read_header(path)
    if own is None or not own.series:
        return [path]
    with os.scandir(path.parent) as entries:
        other_names = sorted(entry.name for entry in entries if entry.is_file() and entry.name != path.name)
    # `path` first, because OpenSlide opens the first file.
    return [path, *(file for name in other_names if _belongs_to(own, file := path.parent / name))]


def series_in(folder: Path) -> dict[DicomHeader, Path]:
    """Return the whole-slide series in a folder, each with the first of its files by name.

    Raises:
        OSError: The folder cannot be read.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    series: dict[DicomHeader, Path] = {}
    for name in names:
        with suppress(OSError):
            header = read_header(folder / name)
            # Files of one series have equal headers, so a series keeps its first file.
            if header is not None and header.whole_slide and header.series:
                series.setdefault(header, folder / name)
    return series


def file_of_slide(path: Path) -> Path:
    """Return the first file of the only DICOM series in a folder; ``path`` itself if it is anything else."""
    try:
        series = series_in(path) if path.is_dir() else {}
    except OSError:
        return path  # the reader will report what is wrong with it
    return next(iter(series.values())) if len(series) == 1 else path


def _belongs_to(series: DicomHeader, file: Path) -> bool:
    try:
        return read_header(file) == series
    except OSError:
        return False  # a file that cannot be read belongs to no slide


@lru_cache(maxsize=2**17)
def _cached_header(path: str, size: int, mtime_ns: int) -> DicomHeader | None:
    """Return the result of `read_header`; size and time only make the cache read a changed file again."""
    with Path(path).open("rb") as file:
        # A preamble of 128 bytes with any content, then the prefix (PS3.10, 7.1).
        if file.read(132)[128:] != b"DICM":
            return None
        file.seek(0)
        return _parsed(file)


def _parsed(file: BinaryIO) -> DicomHeader:
    """Return the header of a DICOM file."""
    from pydicom.filereader import read_partial  # importing it takes half a second: only for DICOM slides

    try:
        # Elements are in the order of their tags (PS3.5, 7.1): pixels, the last, are never read.
        dataset = read_partial(
            file, stop_when=lambda tag, vr, length: tag > _SERIES_NUMBER, specific_tags=[_SERIES, _SERIES_NUMBER]
        )
        # Values are parsed when they are asked for.
        series, number = text_of(dataset, _SERIES), text_of(dataset, _SERIES_NUMBER)
        return DicomHeader(text_of(dataset.file_meta, _SOP_CLASS) == WHOLE_SLIDE, series, number)
    except Exception as error:  # damaged files raise many types, also OSError without errno
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return DicomHeader(whole_slide=True, series="")  # the reader will report what is wrong with it


def text_of(elements: Dataset, tag: int) -> str:
    """Return a value as text, without pydicom's warnings about invalid ones."""
    value = elements.get_item(tag).value if tag in elements else b""
    return value.decode("ascii", "replace").rstrip("\0 ") if isinstance(value, bytes) else str(value or "")
