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
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import imagecodecs
import numpy as np

from pathology.readers.facts.colour import believed_jpeg, pixels_say
from pathology.readers.facts.jpeg_2000 import is_jp2
from pathology.readers.facts.slide_facts import StatedMpp
from pathology.readers.jpeg_tile import stored_jpeg
from pathology.readers.mpp import agree

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
_SOP_CLASS, _SERIES, _SERIES_NUMBER = 0x00020002, 0x0020000E, 0x00200011
PHOTOMETRIC = 0x00280004
_SHARED, PER_FRAME = 0x52009229, 0x52009230
OF_FRAMES = [0x00080008, 0x00209311, 0x00280008, 0x00480006, 0x00480007, 0x00280011, 0x00280010]
"""ImageType, DimensionOrganizationType, NumberOfFrames, (columns, rows) of the pixel matrix, and of a frame."""
CONCATENATION = 0x00209161
_PER_FRAME_TAG = b"\x00\x52\x30\x92"
# Explicit or implicit value representation. Four bytes alone may be an offset in the extended table of offsets.
_PIXELS_START, _IMPLICIT_PIXELS_START = re.compile(rb"\xe0\x7f\x10\x00O[BW]\0\0"), re.compile(rb"\xe0\x7f\x10\x00")
SYNTAX, _IMPLICIT = 0x00020010, "1.2.840.10008.1.2"
_COLUMN, _ROW = (
    # Explicit or implicit value representation.
    re.compile(rb"\x48\x00" + tag + rb"\x02(?:SL\x04\x00|\x04\x00\x00\x00)(.{4})", re.DOTALL)
    for tag in (rb"\x1e", rb"\x1f")
)
_PART_BYTES, _LARGEST_PART_BYTES, _LARGEST_SEQUENCE_BYTES = 2**16, 2**22, 2**30
_JPEG_START, _JPEG_2000_START = b"\xff\xd8", b"\xff\x4f"
ITEM = b"\xfe\xff\x00\xe0"
_AGAIN = "DICOM does not allow; convert the slide again from its original"
_SHOWN_AS_RGB = ("RGB", "YBR_ICT", "YBR_RCT")
"""PhotometricInterpretations for which OpenSlide shows frames as they are, after the transform of their codestream."""


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
            if header is not None and header.whole_slide and header.series:
                series.setdefault(header, folder / name)
    return series


def frame_contradiction(path: Path) -> str:
    """Return how the first frame of a DICOM file contradicts its header; empty if it does not.

    Damaged files are reported by the reader.
    """
    with suppress(Exception), path.open("rb") as file:
        photometric, frame = _first_frame(file)
        if frame.startswith(_JPEG_START):
            declared, right = ("rgb", "YBR_FULL_422") if photometric == "RGB" else ("ycbcr", "RGB")
            _, note = believed_jpeg(declared, [frame], stored_jpeg)
            if note is None:
                return ""
            contradiction = f"PhotometricInterpretation is {photometric}, its JPEG frames say otherwise"
            return f"{contradiction}: its colours would be wrong; make it {right} in the slide's files"
        if is_jp2(frame):
            return f"its frames are JP2 files, which {_AGAIN}"
        if photometric in _SHOWN_AS_RGB and frame.startswith(_JPEG_2000_START):
            stored = imagecodecs.jpeg2k_decode(frame, numthreads=1)
            contradiction = f"PhotometricInterpretation is {photometric}, but its JPEG 2000 frames hold YCbCr"
            return f"{contradiction}, which {_AGAIN}" if pixels_say([stored[..., :3]]) == "ycbcr" else ""
    return ""


def _first_frame(file: BinaryIO) -> tuple[str, bytes]:
    """Return (PhotometricInterpretation, first fragment of encapsulated pixels, b"" if there is none); PS3.5, A.4."""
    dataset, _, at = before_pixels(file, [PHOTOMETRIC])
    photometric = text_of(dataset, PHOTOMETRIC)
    file.seek(at + 12)  # the element's tag, type and length
    # Items have a tag and a length of four bytes each: first the table of offsets, then the fragments.
    item = file.read(8)
    if item[:4] != ITEM:  # uncompressed pixels have no items
        return photometric, b""
    file.seek(int.from_bytes(item[4:], "little"), os.SEEK_CUR)
    return photometric, file.read(int.from_bytes(file.read(8)[4:], "little"))


def before_pixels(file: BinaryIO, wanted: list[int]) -> tuple[Dataset, bytes, int]:
    """Return the head of a DICOM file, the elements of its frames as they are stored, and the offset of its pixels.

    The latter are searched for the pixels: a slide has up to a million frames, and pydicom takes 0.1 ms for each.

    Args:
        file: The file.
        wanted: Tags of the head to read.

    Raises:
        ValueError: It has no pixels.
    """
    from pydicom.filereader import read_partial

    file.seek(0)
    dataset = read_partial(file, stop_when=lambda tag, vr, length: tag >= PER_FRAME, specific_tags=list(wanted))
    pattern = _IMPLICIT_PIXELS_START if text_of(dataset.file_meta, SYNTAX) == _IMPLICIT else _PIXELS_START
    start, data, count = file.tell(), bytearray(), _PART_BYTES
    while len(data) < _LARGEST_SEQUENCE_BYTES and (part := file.read(count)):
        searched = max(0, len(data) - 8)  # the pixels' tag may be in two parts
        data += part
        if (found := pattern.search(data, searched)) is not None:
            return dataset, bytes(data[: found.start()]), start + found.start()
        count = min(2 * count, _LARGEST_PART_BYTES)
    raise ValueError("no pixels")


def position_contradiction(path: Path) -> str:
    """Return how the stated positions of a level's frames contradict its header; empty if they do not.

    OpenSlide trusts the positions. If they are wrong, it omits frames or shows them at wrong places; if there are none,
    it crashes. Files that are not a level, or too damaged to tell, are left to the reader.
    """
    with suppress(Exception), path.open("rb") as file:
        dataset, groups, _ = before_pixels(file, [*OF_FRAMES, CONCATENATION])
        kind, organisation, stated = (text_of(dataset, tag) for tag in OF_FRAMES[:3])
        if "VOLUME" not in kind:
            return ""
        positions, count = frame_positions(groups), int(stated or 1)
        columns, rows, *frame = (int(dataset[tag].value) for tag in OF_FRAMES[3:])
        if positions or organisation == "TILED_SPARSE":
            return _wrong_positions(positions, count, (columns, rows))
        # Without positions, frames are in row-major order. OpenSlide counts those of a level in several files.
        needed = -(-columns // frame[0]) * -(-rows // frame[1])
        if count != needed and CONCATENATION not in dataset:
            several = " (several optical paths or focal planes are not read)" if count % needed == 0 else ""
            return f"it has {count} frames, but {columns} × {rows} px are {needed}{several}"
    return ""


def offsets_contradiction(path: Path) -> str:
    """Return how the table of offsets of a level's frames contradicts its pixels; empty if it does not.

    OpenSlide trusts it (PS3.5, A.4: Basic Offset Table): it shows frames at wrong places, or crashes. Offsets have 32
    bits, so those beyond 4 GiB start again from 0.
    """
    with suppress(Exception), path.open("rb") as file:
        dataset, _, at = before_pixels(file, OF_FRAMES[:1])
        if "VOLUME" not in text_of(dataset, OF_FRAMES[0]):
            return ""  # a label, which is not shown
        file.seek(at + 12)
        item = file.read(8)
        table = np.frombuffer(file.read(int.from_bytes(item[4:], "little")) if item[:4] == ITEM else b"", "<u4")
        if not len(table):
            return ""  # frames are found one after the other
        start = file.tell()
        begins = [file.seek(start + int(offset)) and file.read(4) == ITEM for offset in table[:: -(-len(table) // 9)]]
        if table[0] or (np.diff(table.astype(np.int64)) <= 0).any() or not all(begins):
            return f"its table of offsets is not that of its {len(table)} frames, which {_AGAIN}"
    return ""


def frame_positions(groups: bytes) -> list[tuple[int, int]]:
    """Return the (column, row) of each frame from PerFrameFunctionalGroupsSequence; empty without this sequence."""
    if not groups.startswith(_PER_FRAME_TAG):
        return []
    columns, rows = (pattern.findall(groups) for pattern in (_COLUMN, _ROW))
    numbers = [[int.from_bytes(value, "little", signed=True) for value in values] for values in (columns, rows)]
    return list(zip(*numbers, strict=True))


def _wrong_positions(positions: list[tuple[int, int]], count: int, size: tuple[int, int]) -> str:
    """Return what is wrong with the positions of ``count`` frames in a level of ``size`` (columns, rows)."""
    if len(positions) != count:
        return f"it has {count} frames, but positions of {len(positions)}"
    outside = [at for at in positions if not (1 <= at[0] <= size[0] and 1 <= at[1] <= size[1])]
    if outside:
        return f"a frame's position is column {outside[0][0]}, row {outside[0][1]}, outside of {size[0]} × {size[1]} px"
    return "" if len(set(positions)) == count else "two of its frames have the same position"


def stated_by_coarser_files(path: Path) -> StatedMpp | None:
    """Return the microns per pixel of the finest level that follow from two or more coarser ones; None if they differ.

    Ignored are levels with the PixelSpacing of the finest one, which some programs copy.
    """
    levels = []
    for file in series_files(path):
        with suppress(Exception):
            levels.append(_spacing_of(file))
    (rows, columns), finest_um = max(levels, default=((0, 0), (0.0, 0.0)))
    derived = [
        (um[0] * size[0] / rows, um[1] * size[1] / columns)
        for size, um in levels
        if size != (rows, columns) and not agree(um, finest_um)
    ]
    if len(derived) < 2 or not all(agree(um, derived[0]) for um in derived):
        return None
    return StatedMpp(derived[0], "the values of PixelSpacing of its coarser levels")


def _spacing_of(path: Path) -> tuple[tuple[int, int], tuple[float, float]]:
    """Return ((rows, columns), microns per pixel) of a level; raises any exception for other files."""
    from pydicom.filereader import read_partial

    wanted = [*OF_FRAMES, _SHARED]
    with path.open("rb") as file:
        dataset = read_partial(file, stop_when=lambda tag, vr, length: tag >= PER_FRAME, specific_tags=wanted)
        if "VOLUME" not in text_of(dataset, OF_FRAMES[0]):
            raise ValueError("not a level")
        columns, rows = (int(dataset[tag].value) for tag in OF_FRAMES[3:5])
        y_mm, x_mm = map(float, dataset[_SHARED].value[0].PixelMeasuresSequence[0].PixelSpacing)
    return (rows, columns), (1000 * y_mm, 1000 * x_mm)


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
        return DicomHeader(text_of(dataset.file_meta, _SOP_CLASS) == _WHOLE_SLIDE, series, number)
    except Exception as error:  # damaged files raise many types, also OSError without errno
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return DicomHeader(whole_slide=True, series="")  # the reader will report what is wrong with it


def text_of(elements: Dataset, tag: int) -> str:
    """Return a value as text, without pydicom's warnings about invalid ones."""
    value = elements.get_item(tag).value if tag in elements else b""
    return value.decode("ascii", "replace").rstrip("\0 ") if isinstance(value, bytes) else str(value or "")
