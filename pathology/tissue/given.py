"""Tissue outlines that the user gives instead of the detected ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyfi_core.errors import RequestError
from pathology.tissue.outlines import Mask, Polygon, SlideGrid, mask_of_polygons, read_polygons

OFF = "off"
_MOST_NAMED = 3


@dataclass(frozen=True)
class SlideTissue:
    """The given tissue of one slide.

    Attributes:
        identity: ``off``, or the SHA-256 of the file.
        path: The file; None with ``off``.
        polygons: Those of the file, in level-0 pixels from the corner of the slide's bounds.
    """

    identity: str
    path: Path | None = None
    polygons: tuple[Polygon, ...] = ()

    def mask(self, grid: SlideGrid, shape: tuple[int, int]) -> Mask:
        """Return the tissue as a mask of ``shape``; all of it with ``off``.

        Raises:
            RequestError: The polygons are outside of the slide, or cover no pixel of the mask.
        """
        if self.path is None:
            return np.ones(shape, bool)
        return mask_of_polygons(self.path, self.polygons, grid, shape)


@dataclass(frozen=True)
class GivenTissue:
    """The tissue of all slides of a command.

    Attributes:
        value: ``off``: the whole slide is tissue; else a GeoJSON of one slide, or a folder with ``<slide_id>.geojson``
            for some of the slides; the tissue of the others is detected.
    """

    value: str

    def of(self, slide_id: str) -> SlideTissue | None:
        """Return the tissue of a slide; None if the folder has no file for it.

        Raises:
            RequestError: Its file cannot be read, or has no polygon.
        """
        if self.value == OFF:
            return SlideTissue(OFF)
        path = self._file(slide_id)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RequestError(f"--tissue {path}: cannot be read ({error.strerror or error})") from error
        return SlideTissue(hashlib.sha256(data).hexdigest(), path, read_polygons(path, data))

    def check(self, slide_ids: Sequence[str]) -> None:
        """Check the value against all slides of the command, and read their files.

        Raises:
            RequestError: The file or folder is missing, one file is for several slides, no slide has a file in the
                folder, or a file has no polygon.
        """
        if self.value == OFF:
            return
        path = Path(self.value)
        if not path.exists():
            raise RequestError(
                f"--tissue {path}: no such file or folder; give a GeoJSON file, a folder of them, or off"
            )
        if not path.is_dir() and len(slide_ids) > 1:
            raise RequestError(
                f"--tissue {path}: one file for {len(slide_ids)} slides; give a folder with a <slide_id>.geojson for "
                f"each"
            )
        if [self.of(name) for name in slide_ids].count(None) == len(slide_ids) > 0:
            raise RequestError(
                f"--tissue {path}: no <slide_id>.geojson for any of these slides, such as {slide_ids[0]}.geojson"
            )

    def note(self, slide_ids: Sequence[str]) -> str:
        """Return a sentence about slides without a file and files without a slide; empty if there are none."""
        path = Path(self.value)
        if self.value == OFF or not path.is_dir():
            return ""
        without = [name for name in slide_ids if self._file(name) is None]
        unused = sorted({file.stem for file in path.glob("*.geojson")} - set(slide_ids))
        parts = [f"no outlines for {_named(without)}, whose tissue is detected"] if without else []
        parts += [f"no slide for {_named([f'{name}.geojson' for name in unused])}"] if unused else []
        return f"--tissue {path}: {'; '.join(parts)}" if parts else ""

    def _file(self, slide_id: str) -> Path | None:
        path = Path(self.value)
        if not path.is_dir():
            return path
        path /= f"{slide_id}.geojson"
        return path if path.exists() else None


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
