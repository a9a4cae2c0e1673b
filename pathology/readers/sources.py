"""Opens a slide file with the reader that suits its format.

| file | reader | reason |
|---|---|---|
| OME-Zarr, a folder or on object storage | `ngff` | |
| CZI | `czi_source` | OpenSlide does not decode JPEG XR, and crashes on damaged files |
| OME-TIFF | `tiff_source` | OpenSlide does not find levels in SubIFDs |
| TIFF of no known scanner | `tiff_source` | libtiff, in OpenSlide, returns damaged tiles without an error |
| Aperio, NDPI | `tiff_source`, metadata from OpenSlide | faster; used if a tile of each level is the same in both |
| other formats of OpenSlide: MRXS, SCN, VMS, DICOM … | `openslide_source` | |
| formats unknown to OpenSlide | `tiff_source` | |
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.czi_file import is_czi, scenes_of_czi
from pathology.readers.czi_source import CziSource
from pathology.readers.dicom.contradictions import frame_contradiction
from pathology.readers.dicom.files import file_of_slide
from pathology.readers.facts.colour import COLOUR_FLAG, ColourError
from pathology.readers.facts.pictures import WHOLE, Pick, PlanesError, check_plane, scenes_of_tiff
from pathology.readers.file_check import check_file
from pathology.readers.ngff.groups import is_ome_zarr
from pathology.readers.ngff.source import OmeZarrSource, scenes_of_store
from pathology.readers.openslide_source import OpenSlideSource, UnsupportedFormatError
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB
from pathology.readers.tiff_metadata import is_ome_tiff, is_truncated, largest_page, orientation_of_file
from pathology.readers.tiff_source import TiffSource, tiled_sizes
from pathology.readers.upright import UprightSource

SLIDE_SUFFIXES = frozenset(
    (
        *(".svs", ".tif", ".tiff", ".btf", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".qptiff"),
        *(".czi", ".dcm"),
    )
)
"""Extensions of slides in a folder that is searched; of DICOM files only those of whole slides count."""

_PLAIN_TIFF = "generic-tiff"
_TILED_TIFF_VENDORS = frozenset(("aperio", _PLAIN_TIFF, "hamamatsu"))


def open_source(path: Path, pick: Pick = WHOLE) -> SlideSource:
    """Open a slide file, the folder of one DICOM slide, or an OME-Zarr store.

    Args:
        path: The file or folder; a store may be on object storage.
        pick: Which of the file's pictures to open, if it has several.

    Raises:
        SlideError: No reader supports the file, or it is damaged, or it has several planes; the message says why.
    """
    if is_ome_zarr(path):
        return OmeZarrSource(path, pick)
    # First, so that the checks are made on the file that will be opened.
    path = file_of_slide(path)
    check_file(path)
    # Formats are recognised by content, because files are renamed; CZI first, as OpenSlide crashes on damaged ones.
    if is_czi(path):
        return CziSource(path, pick)
    if is_ome_tiff(path):
        return _upright(_tiff(path, pick))
    if pick.scene > 1:
        raise SlideError(f"there is no scene {pick.scene}: the file has 1")
    try:
        by_openslide = OpenSlideSource(path)
    except UnsupportedFormatError:
        return _upright(_tiff(path, pick))
    except SlideError:
        if not is_truncated(path):
            raise
        return _upright(_tiff(path, pick))  # the levels before the end of the file may be enough
    # `by_openslide` may be closed below; its attributes still describe the slide.
    if by_openslide.vendor not in _TILED_TIFF_VENDORS:
        try:
            check_plane(pick, 1)
            _check_dicom_frames(by_openslide, path)
            by_openslide.check_levels()
        except BaseException:
            by_openslide.close()
            raise
        return by_openslide
    if by_openslide.vendor == _PLAIN_TIFF:
        by_openslide.close()
        size = by_openslide.levels[0].height_px, by_openslide.levels[0].width_px
        is_largest = largest_page(path) == size  # OpenSlide takes the first page, which may be a label
        return _upright(_tiff(path, pick, by_openslide=by_openslide if is_largest else None))
    if orientation_of_file(path) != 1:  # OpenSlide rotates each tile but not its position
        by_openslide.close()
        return _upright(_tiff(path, pick, by_openslide=by_openslide))
    by_tifffile = _tiff_with_same_pixels(path, by_openslide, pick)
    if by_tifffile is not None:
        return by_tifffile
    by_openslide.check_levels()
    return by_openslide


def scene_count(path: Path) -> int:
    """Return the number of scenes of a slide file or store; 1 if it cannot have several, or cannot be read."""
    if is_ome_zarr(path):
        return scenes_of_store(path)
    if _is_czi(path):
        return max(1, len(scenes_of_czi(path)))
    return scenes_of_tiff(path)


def largest_scene(path: Path) -> int:
    """Return the number of the largest scene of a CZI file; 0 for other files: their readers then take the largest."""
    sizes = scenes_of_czi(path) if _is_czi(path) else ()
    if len(sizes) < 2:
        return 0
    areas_px = [height * width for height, width in sizes]
    # If several are equally large, the first. Scenes are numbered from 1.
    return 1 + areas_px.index(max(areas_px))


def _is_czi(path: Path) -> bool:
    try:
        return path.is_file() and is_czi(path)  # opening a pipe would block
    except OSError:
        return False  # the reader reports what is wrong with it


def _check_dicom_frames(by_openslide: OpenSlideSource, path: Path) -> None:
    """Refuse a DICOM slide whose frames contradict its header, which OpenSlide believes.

    Raises:
        SlideError: They do; the message has both.
    """
    if by_openslide.vendor == "dicom" and (contradiction := frame_contradiction(path)):
        raise SlideError(contradiction)


def _tiff(path: Path, pick: Pick, by_openslide: SlideSource | None = None) -> TiffSource:
    return TiffSource(path, by_openslide=by_openslide, reopen=partial(open_source, pick=pick), pick=pick)


def _upright(stored: TiffSource) -> SlideSource:
    """Return the slide upright by the orientation of its own page; the page of a label before it may have another."""
    return stored if stored.orientation == 1 else UprightSource(stored, stored.orientation)


def _tiff_with_same_pixels(path: Path, by_openslide: OpenSlideSource, pick: Pick) -> TiffSource | None:
    """Return a `TiffSource`, which is faster, unless it has other pixels than OpenSlide.

    Returns:
        The `TiffSource`; ``by_openslide`` is then closed. None if its pixels differ, or if it cannot read the file.

    Raises:
        PlanesError: The file has several planes, and none is picked.
        ColourError: Nothing in the file says whether its pixels are RGB or YCbCr.
    """
    all_levels = list(range(len(by_openslide.levels)))
    # Indices of the levels that the file stores: of an NDPI (Hamamatsu), OpenSlide computes some.
    stored = _stored_levels(path, by_openslide) if by_openslide.vendor == "hamamatsu" else all_levels

    def fill_missing(box: Box, place: int, out: RGB) -> None:
        by_openslide.read_into(box, stored[place], out)

    reopen = partial(open_source, pick=pick)
    try:
        tiff = TiffSource(
            path, by_openslide=by_openslide, fill_missing=fill_missing, stored=stored, reopen=reopen, pick=pick
        )
    except (PlanesError, ColourError):
        by_openslide.close()
        raise
    except SlideError:
        return None
    # Not comparable, so taken as it is: of several focal planes OpenSlide shows one of its own choice, and it believes
    # wrong colour tags.
    is_comparable = not tiff.is_one_of_planes and not any(note.flag == COLOUR_FLAG for note in tiff.facts.notes)
    # `kept`: for each level of the TIFF, its place in `stored`.
    pairs = [(k, stored[index]) for k, index in enumerate(tiff.kept)]
    if is_comparable and not all(_has_same_pixels(tiff, k, by_openslide, level) for k, level in pairs):
        tiff.close()
        return None
    by_openslide.close()  # opens itself again if a missing tile is read
    return tiff


def _stored_levels(path: Path, by_openslide: OpenSlideSource) -> list[int]:
    """Return the indices of the levels of an NDPI that are stored in the file.

    OpenSlide adds levels in between by decoding JPEGs at a smaller size; area resampling of stored pixels keeps more
    detail.
    """
    sizes = tiled_sizes(path)
    stored = [k for k, level in enumerate(by_openslide.levels) if (level.height_px, level.width_px) in sizes]
    # Without the finest level, the file is not as expected: then all levels count.
    return stored if stored[:1] == [0] else list(range(len(by_openslide.levels)))


def _has_same_pixels(tiff: TiffSource, k: int, by_openslide: OpenSlideSource, level: int) -> bool:
    """Whether both readers return the same pixels for a tile: the middle one of the finest level, the first of others.

    True if the tile is damaged: `TiffSource` then raises when it is read, whereas OpenSlide might return wrong pixels.

    Args:
        tiff: The slide by tifffile.
        k: Index of the level in ``tiff``.
        by_openslide: The slide by OpenSlide.
        level: Index of the same level in ``by_openslide``.
    """
    size = tiff.levels[k]
    height, width = size.tile_px
    y = size.height_px // 2 // height * height if level == 0 else 0
    x = size.width_px // 2 // width * width if level == 0 else 0
    box = Box(y, y + height, x, x + width).intersect(Box.of_size(size.height_px, size.width_px))
    try:
        return bool(np.array_equal(tiff.read(box, k), by_openslide.read(box, level)))
    except TileError:
        return True
