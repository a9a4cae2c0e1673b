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
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

_WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
_SOP_CLASS, _SERIES = 0x00020002, 0x0020000E
_LONG = frozenset((b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"))
"""Value representations whose length has four bytes (PS3.5 section 7.1.2)."""
_UNDEFINED = 0xFFFFFFFF
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_LONGEST_UID_BYTES = 64
_DEEPEST = 16


@dataclass(frozen=True, slots=True)
class DicomHead:
    """What a DICOM file says about itself at its start.

    Attributes:
        whole_slide: Whether it is a file of a whole-slide image.
        series: UID of its series; empty where it says none that can be read.
    """

    whole_slide: bool
    series: str


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


def _is_of(series: DicomHead, other: Path) -> bool:
    try:
        return dicom_head(other) == series
    except OSError:
        return False  # a file that nobody can read is of nobody's slide


@lru_cache(maxsize=2**17)
def _head(path: str, size: int, mtime_ns: int) -> DicomHead | None:
    """The arguments beyond the path are there for the cache: another state is read again."""
    with Path(path).open("rb") as file:
        if file.read(132)[128:] != b"DICM":
            return None
        found = _values(file, (_SOP_CLASS, _SERIES))
    return DicomHead(found.get(_SOP_CLASS) == _WHOLE_SLIDE, found.get(_SERIES, ""))


def _values(file: BinaryIO, wanted: tuple[int, ...]) -> dict[int, str]:
    """Return the texts of elements outside of sequences; explicit little endian, as all slides are."""
    found: dict[int, str] = {}
    while (element := _element(file)) is not None and element[0] <= max(wanted):
        tag, length = element
        if length == _UNDEFINED:
            _skip_items(file, 0)
        elif tag in wanted:
            found[tag] = file.read(min(length, _LONGEST_UID_BYTES)).decode("ascii", "replace").rstrip("\0 ")
        else:
            file.seek(length, os.SEEK_CUR)
    return found


def _element(file: BinaryIO) -> tuple[int, int] | None:
    """Read (tag, length) of the next element or item; None at the end of the file."""
    head = file.read(8)
    if len(head) < 8:
        return None
    group, number, kind, short = struct.unpack("<HH2sH", head)
    tag = group << 16 | number
    if group == 0xFFFE:
        return tag, int.from_bytes(head[4:], "little")
    return tag, int.from_bytes(file.read(4), "little") if kind in _LONG else short


def _skip_items(file: BinaryIO, depth: int) -> None:
    """Go on behind a sequence of undefined length, or behind an item of one."""
    while depth < _DEEPEST and (element := _element(file)) is not None:
        tag, length = element
        if tag in (_ITEM_END, _SEQUENCE_END):
            return
        if length == _UNDEFINED:
            _skip_items(file, depth + 1)
        else:
            file.seek(length, os.SEEK_CUR)
