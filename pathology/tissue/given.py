"""Tissue outlines that the user gives instead of the detected ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.arrays import Mask
from data.files import as_on_disk
from hyfi_core.errors import RequestError
from pathology.tissue.geojson import Areas, read_areas
from pathology.tissue.outlines import SlideGrid, mask_of_areas

OFF = "off"
_MOST_NAMED = 3


@dataclass(frozen=True)
class SlideTissue:
    """The given tissue of one slide.

    Attributes:
        identity: ``off``, or the SHA-256 of the file.
        path: The file; None with ``off``.
        areas: The file's areas; None with ``off``.
    """

    identity: str
    path: Path | None = None
    areas: Areas | None = None

    def mask(self, grid: SlideGrid, shape: tuple[int, int]) -> Mask:
        """Return the tissue as a mask of ``shape``; without a file (``off``) every pixel is tissue.

        Raises:
            RequestError: The polygons are outside of the slide, or cover no pixel of the mask.
        """
        if self.path is None or self.areas is None:
            return np.ones(shape, bool)
        return mask_of_areas(self.path, self.areas, grid, shape)


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
        return SlideTissue(hashlib.sha256(data).hexdigest(), path, read_areas(path, data))

    def check(self, slide_ids: Sequence[str]) -> str:
        """Check the value against all slides of the command, and read their files.

        Returns:
            Sentences about slides without a file, files without a slide, and objects of files that are left out; empty
            if there is nothing to say.

        Raises:
            RequestError: The file or folder is missing, one file is for several slides, no slide has a file in the
                folder, or a file has no polygon.
        """
        if self.value == OFF:
            return ""
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
        left_out, files = {}, 0
        for name in slide_ids:  # one after the other: files may be large
            tissue = self.of(name)
            if tissue is None:
                continue
            files += 1
            if tissue.path is not None and tissue.areas is not None and tissue.areas.left_out:
                left_out[tissue.path.name] = tissue.areas.left_out
        if slide_ids and not files:
            raise RequestError(
                f"--tissue {path}: no <slide_id>.geojson for any of these slides, such as {slide_ids[0]}.geojson"
            )
        return "; ".join(text for text in (self._unmatched(slide_ids), _left_out(left_out)) if text)

    def _unmatched(self, slide_ids: Sequence[str]) -> str:
        """Return a sentence about slides without a file and files without a slide; empty if there are none."""
        path = Path(self.value)
        if not path.is_dir():
            return ""
        without = [name for name in slide_ids if self._file(name) is None]
        used = {slide_file.name for name in slide_ids if (slide_file := self._file(name)) is not None}
        unused = sorted(file.stem for file in path.glob("*.geojson") if file.name not in used)
        parts = [f"no outlines for {_named(without)}, whose tissue is detected"] if without else []
        parts += [f"no slide for {_named([f'{name}.geojson' for name in unused])}"] if unused else []
        return f"--tissue {path}: {'; '.join(parts)}" if parts else ""

    def _file(self, slide_id: str) -> Path | None:
        """Return the file with a slide's tissue: the given file, or the slide's file in the given folder, else None."""
        path = Path(self.value)
        if not path.is_dir():
            return path
        # macOS and Linux spell accents in different ways.
        path = as_on_disk(path / f"{slide_id}.geojson")
        return path if path.exists() else None


def _left_out(files: Mapping[str, str]) -> str:
    """Return a sentence about objects of files that are left out."""
    listed = [f"{name}: left out {omitted}" for name, omitted in list(files.items())[:_MOST_NAMED]]
    more = [f"and of {len(files) - _MOST_NAMED} more files"] if len(files) > _MOST_NAMED else []
    return "; ".join(listed + more)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
