"""What in a DICOM file contradicts its pixels, which OpenSlide would show wrongly, or crash on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import imagecodecs
import numpy as np

from pathology.readers.dicom.files import text_of
from pathology.readers.dicom.pixels import (
    CONCATENATION,
    FRAME_COLUMNS,
    FRAME_COUNT,
    FRAME_ROWS,
    ITEM,
    LEVEL_COLUMNS,
    LEVEL_ROWS,
    OF_FRAMES,
    ORGANISATION,
    before_pixels,
    first_frame,
    frame_positions,
    is_level,
)
from pathology.readers.facts.colour import believed_jpeg, pixels_say
from pathology.readers.facts.jpeg_2000 import is_jp2
from pathology.readers.jpeg_tile import stored_jpeg

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_JPEG_START, _JPEG_2000_START = b"\xff\xd8", b"\xff\x4f"
_AGAIN = "DICOM does not allow; convert the slide again from its original"
_SHOWN_AS_RGB = ("RGB", "YBR_ICT", "YBR_RCT")
"""PhotometricInterpretations for which OpenSlide shows frames as they are, after the transform of their codestream."""


def frame_contradiction(path: Path) -> str:
    """Return how the first frame of a DICOM file contradicts its header; empty if it does not.

    Damaged files are reported by the reader.
    """
    with suppress(Exception), path.open("rb") as file:
        photometric, frame = first_frame(file)
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


def level_contradiction(path: Path) -> str:
    """Return what contradicts the pixels of a level: the table of its frames' offsets, or its header; empty if nothing.

    Also empty for files that are not a level, such as a label, and for those too damaged to tell: the reader decides.
    """
    with suppress(Exception), path.open("rb") as file:
        head, of_frames, pixels_at = before_pixels(file, [*OF_FRAMES, CONCATENATION])
        if is_level(head):
            # The table of offsets follows the tag, type and length of the pixels, 12 bytes.
            return _offsets_contradiction(file, pixels_at + 12) or _frames_contradiction(head, of_frames)
    return ""


def _frames_contradiction(head: Dataset, of_frames: bytes) -> str:
    """Return how the number of frames, or their stated positions, contradict the header of their level.

    OpenSlide trusts the positions. If they are wrong, it omits frames or shows them at wrong places; if there are none,
    it crashes.

    Args:
        head: The elements `OF_FRAMES` of the header.
        of_frames: The elements of the frames as they are stored, with their positions.
    """
    positions, count = frame_positions(of_frames), int(text_of(head, FRAME_COUNT) or 1)
    columns, rows = int(head[LEVEL_COLUMNS].value), int(head[LEVEL_ROWS].value)
    if positions or text_of(head, ORGANISATION) == "TILED_SPARSE":
        return _wrong_positions(positions, count, (columns, rows))
    # Without positions, frames are in row-major order. OpenSlide counts those of a level in several files.
    needed = -(-columns // int(head[FRAME_COLUMNS].value)) * -(-rows // int(head[FRAME_ROWS].value))
    if count == needed or CONCATENATION in head:
        return ""
    several = " (several optical paths or focal planes are not read)" if count % needed == 0 else ""
    return f"it has {count} frames, but {columns} × {rows} px are {needed}{several}"


def _offsets_contradiction(file: BinaryIO, at: int) -> str:
    """Return how the table of offsets, the item at ``at``, contradicts the pixels.

    OpenSlide trusts it (PS3.5, A.4: Basic Offset Table): it shows frames at wrong places, or crashes. Offsets have 32
    bits, so those beyond 4 GiB start again from 0.
    """
    file.seek(at)
    item = file.read(8)
    table = np.frombuffer(file.read(int.from_bytes(item[4:], "little")) if item[:4] == ITEM else b"", "<u4")
    if not len(table):
        return ""  # frames are found one after the other
    start = file.tell()
    # Up to nine frames are looked at: of a large slide, all would take minutes.
    begins = [file.seek(start + int(offset)) and file.read(4) == ITEM for offset in table[:: -(-len(table) // 9)]]
    if table[0] or (np.diff(table.astype(np.int64)) <= 0).any() or not all(begins):
        return f"its table of offsets is not that of its {len(table)} frames, which {_AGAIN}"
    return ""


def _wrong_positions(positions: list[tuple[int, int]], count: int, size: tuple[int, int]) -> str:
    """Return what is wrong with the positions of ``count`` frames in a level of ``size`` (columns, rows)."""
    if len(positions) != count:
        return f"it has {count} frames, but positions of {len(positions)}"
    outside = [at for at in positions if not (1 <= at[0] <= size[0] and 1 <= at[1] <= size[1])]
    if outside:
        return f"a frame's position is column {outside[0][0]}, row {outside[0][1]}, outside of {size[0]} × {size[1]} px"
    return "" if len(set(positions)) == count else "two of its frames have the same position"
