"""Microns per pixel that the files of a DICOM slide's levels state."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pathology.readers.dicom.files import series_files
from pathology.readers.dicom.pixels import IMAGE_TYPE, LEVEL_COLUMNS, LEVEL_ROWS, is_level, read_head
from pathology.readers.facts.slide_facts import StatedMpp
from pathology.readers.mpp import agree

_SHARED = 0x52009229


def stated_by_coarser_files(path: Path) -> StatedMpp | None:
    """Return the microns per pixel of the finest level that follow from the spacing of coarser levels.

    Levels with the PixelSpacing of the finest one are ignored, because some programs copy it. None if fewer than two
    coarser levels remain, or what follows from them differs.
    """
    levels = []  # ((rows, columns), microns per pixel), so that the greatest is the finest level
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
    with path.open("rb") as file:
        head = read_head(file, [IMAGE_TYPE, LEVEL_COLUMNS, LEVEL_ROWS, _SHARED])
        if not is_level(head):
            raise ValueError("not a level")
        rows, columns = int(head[LEVEL_ROWS].value), int(head[LEVEL_COLUMNS].value)
        y_mm, x_mm = map(float, head[_SHARED].value[0].PixelMeasuresSequence[0].PixelSpacing)
    return (rows, columns), (1000 * y_mm, 1000 * x_mm)
