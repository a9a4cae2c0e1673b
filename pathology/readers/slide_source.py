"""What every reader of slides offers."""

from __future__ import annotations

from typing import Protocol

from hyfi_core.plan.box import Box
from pathology.readers.source_level import RGB, Affine, BadTile, SourceLevel


class SlideSource(Protocol):
    """An open slide file. Threads, forked and spawned processes may all read from one.

    Attributes:
        levels: Finest first. A source that states bounds counts pixels from their first one.
        mpp: Microns per pixel (y, x) of the finest level, None where the file does not state them.
        bounds: The box of the file's finest level that ``levels`` show.
        to_file_px: From (y, x) of ``levels[0]`` to (y, x) of the file's finest level as it is stored: adds the start
            of the bounds, undoes what Orientation did. What is put beside the file (heatmaps, outlines) counts so.
        vendor: Name of the scanner's maker or of the format.
        objective_power: As the file states it.
        icc: The ICC profile's bytes; pixels are as stored, `pathology.ingest.content` converts them.
    """

    levels: tuple[SourceLevel, ...]
    mpp: tuple[float, float] | None
    bounds: Box
    to_file_px: Affine
    vendor: str
    objective_power: float | None
    icc: bytes | None

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)`` uint8 of a box inside the level, new and the caller's own.

        Raises:
            TileError: Something in the box cannot be decoded. The source stays usable.
        """

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Fill the caller's memory with a box inside the level.

        Args:
            box: Pixels of the level.
            level: Its index.
            out: ``(h, w, 3)`` uint8 of any strides: a view of planes will do.
            bad: Takes the tiles that cannot be decoded; their place in ``out`` is white and all others are read.

        Raises:
            TileError: Something cannot be decoded and there is no ``bad``. The source stays usable.
        """

    def close(self) -> None:
        """Let go of the file."""
