"""Which files of a folder make one DICOM slide: those of one series (DICOM PS3.3 A.32.8, PS3.10 section 7).

```
SLIDE/1.dcm   level 0  \
      2.dcm   level 1   |  one series, one slide: OpenSlide opens any of them and finds the others
      3.dcm   label    /
      4.dcm   another series: another slide
      5.dcm   a CT picture: none
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

_WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
_SOP_CLASS, _SERIES, _SERIES_NUMBER = 0x00020002, 0x0020000E, 0x00200011


@dataclass(frozen=True, slots=True)
class DicomHead:
    """What a DICOM file says about itself at its start.

    Attributes:
        whole_slide: Whether it is a file of a whole-slide image; True, too, where it is too damaged to tell.
        series: UID of its series; empty where it says none that can be read.
        number: Number of its series in the study; alike.
    """

    whole_slide: bool
    series: str
    number: str = ""


def dicom_head(path: Path) -> DicomHead | None:
    """Return what a DICOM file is; None for other files. Reads some kilobytes, once for each state of the file.

    Raises:
        OSError: It cannot be read.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        return None  # a pipe would be waited for
    return _head(str(path), state.st_size, state.st_mtime_ns)


def series_files(path: Path) -> list[Path]:
    """Return the files of a DICOM slide: itself, then those of its folder that belong to the same series, by name.

    Raises:
        OSError: The folder or the file cannot be read.
    """
    own = dicom_head(path)
    if own is None or not own.series:
        return [path]
    with os.scandir(path.parent) as entries:
        others = sorted(entry.name for entry in entries if entry.is_file() and entry.name != path.name)
    return [path, *(other for name in others if _is_of(own, other := path.parent / name))]


def series_in(folder: Path) -> dict[DicomHead, Path]:
    """Return the whole-slide series whose files lie in a folder, each with the first of its files by name.

    Raises:
        OSError: The folder cannot be read.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    found: dict[DicomHead, Path] = {}
    for name in names:
        with suppress(OSError):
            head = dicom_head(folder / name)
            if head is not None and head.whole_slide and head.series:
                found.setdefault(head, folder / name)
    return found


def file_of_slide(path: Path) -> Path:
    """Return a file that opens the slide: of a folder with one DICOM series its first, else ``path`` itself."""
    try:
        series = series_in(path) if path.is_dir() else {}
    except OSError:
        return path  # what is wrong with it, its reader will say
    return next(iter(series.values())) if len(series) == 1 else path


def _is_of(series: DicomHead, other: Path) -> bool:
    try:
        return dicom_head(other) == series
    except OSError:
        return False  # a file that cannot be read belongs to no slide


@lru_cache(maxsize=2**17)
def _head(path: str, size: int, mtime_ns: int) -> DicomHead | None:
    """The arguments beyond the path are there for the cache: another state is read again."""
    with Path(path).open("rb") as file:
        if file.read(132)[128:] != b"DICM":
            return None
        file.seek(0)
        return _parsed(file)


def _parsed(file: BinaryIO) -> DicomHead:
    from pydicom.filereader import read_partial  # takes half a second, which only DICOM slides should cost

    try:
        found = read_partial(
            file, stop_when=lambda tag, vr, length: tag > _SERIES_NUMBER, specific_tags=[_SERIES, _SERIES_NUMBER]
        )
    except Exception as error:  # each kind of damage has its own, an OSError without a number among them
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return DicomHead(True, "")  # what is wrong with it, its reader will say
    series, number = _text(found, _SERIES), _text(found, _SERIES_NUMBER)
    return DicomHead(_text(found.file_meta, _SOP_CLASS) == _WHOLE_SLIDE, series, number)


def _text(elements: Dataset, tag: int) -> str:
    """Return a value as it is stored: a wrong one is not worth a warning."""
    value = elements.get_item(tag).value if tag in elements else b""
    return value.decode("ascii", "replace").rstrip("\0 ") if isinstance(value, bytes) else str(value or "")
