"""Which reader opens a slide file.

```
OME-TIFF (OpenSlide does not see levels in SubIFDs)         → pathology.readers.tiff_source
what OpenSlide knows: TIFFs of no scanner (libtiff shows
                      damaged tiles without error)           → pathology.readers.tiff_source, or refused
                      Aperio and NDPI that both show with
                      the same pixels (tried on open)       → pathology.readers.tiff_source; facts, gaps: OpenSlide
                      all else (MRXS, SCN, VMS, DICOM …)    → pathology.readers.openslide_source
CZI (OpenSlide has no JPEG XR; damage ends its process)     → pathology.readers.czi_source
what OpenSlide does not know                                → pathology.readers.tiff_source
```
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.czi_file import is_czi
from pathology.readers.czi_source import CziSource
from pathology.readers.dicom_files import file_of_slide
from pathology.readers.file_check import check_file
from pathology.readers.openslide_source import OpenSlideSource, UnsupportedFormatError
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB
from pathology.readers.tiff_facts import is_ome_tiff, is_truncated, largest_page, orientation_of_file
from pathology.readers.tiff_source import TiffSource, tiled_sizes
from pathology.readers.upright import UprightSource

SLIDE_SUFFIXES = frozenset(
    (
        *(".svs", ".tif", ".tiff", ".btf", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".qptiff"),
        *(".czi", ".dcm"),
    )
)
"""What a folder is searched for; of DICOM files those that are whole slides."""

_PLAIN_TIFF = "generic-tiff"
_TILED_TIFF_VENDORS = frozenset(("aperio", _PLAIN_TIFF, "hamamatsu"))


def open_source(path: Path) -> SlideSource:
    """Open a slide file, or the folder of one DICOM slide.

    Raises:
        SlideError: No reader knows the file, or it is damaged; the message says why.
    """
    path = file_of_slide(path)
    check_file(path)
    if is_czi(path):
        return CziSource(path)
    if is_ome_tiff(path):
        return _upright(_tiff(path), path)
    try:
        slow = OpenSlideSource(path)
    except UnsupportedFormatError:
        return _upright(_tiff(path), path)
    except SlideError:
        if not is_truncated(path):
            raise
        return _upright(_tiff(path), path)  # what precedes the cut may be all that is wanted
    if slow.vendor not in _TILED_TIFF_VENDORS:
        return slow
    if slow.vendor == _PLAIN_TIFF:
        slow.close()
        size = slow.levels[0].height_px, slow.levels[0].width_px
        largest = largest_page(path) == size  # OpenSlide takes the first page, which may be a label
        return _upright(_tiff(path, known=slow if largest else None), path)
    if orientation_of_file(path) != 1:  # OpenSlide turns each tile and leaves it in its place
        slow.close()
        return _upright(_tiff(path, known=slow), path)
    return _faster(path, slow) or slow


def _tiff(path: Path, known: SlideSource | None = None) -> TiffSource:
    return TiffSource(path, known=known, reopen=open_source)


def _upright(stored: TiffSource, path: Path) -> SlideSource:
    orientation = orientation_of_file(path)
    return stored if orientation == 1 else UprightSource(stored, orientation)


def _faster(path: Path, slow: OpenSlideSource) -> TiffSource | None:
    """Return the fast reader where it shows what OpenSlide shows; None where it does not read the file."""
    stored = _stored_levels(path, slow) if slow.vendor == "hamamatsu" else list(range(len(slow.levels)))

    def fill_missing(box: Box, level: int, out: RGB) -> None:
        slow.read_into(box, stored[level], out)

    try:
        fast = TiffSource(path, known=slow, fill_missing=fill_missing, stored=stored, reopen=open_source)
    except SlideError:
        return None
    if all(_same_pixels(fast, k, slow, level) for k, level in enumerate(stored)):
        slow.close()  # until a tile that was left out is asked for
        return fast
    fast.close()
    return None


def _stored_levels(path: Path, slow: OpenSlideSource) -> list[int]:
    """Return those levels of an NDPI that are in the file.

    OpenSlide adds halves of them, decoded at a smaller size; an area filter over the stored pixels keeps more detail.
    """
    sizes = tiled_sizes(path)
    found = [k for k, level in enumerate(slow.levels) if (level.height_px, level.width_px) in sizes]
    return found if found[:1] == [0] else list(range(len(slow.levels)))


def _same_pixels(fast: TiffSource, k: int, slow: OpenSlideSource, level: int) -> bool:
    """Whether both readers return the same pixels of one tile: the middle of the finest level, the first of others.

    True where it is damaged: the fast reader refuses it when it is read, and OpenSlide may show it anyway.
    """
    size = fast.levels[k]
    height, width = size.tile_px
    y = size.height_px // 2 // height * height if level == 0 else 0
    x = size.width_px // 2 // width * width if level == 0 else 0
    box = Box(y, y + height, x, x + width).intersect(Box.of_size(size.height_px, size.width_px))
    try:
        return bool(np.array_equal(fast.read(box, k), slow.read(box, level)))
    except TileError:
        return True
