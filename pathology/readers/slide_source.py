"""Interface of all readers of slides."""

from __future__ import annotations

from typing import Protocol

from hyfi_core.plan.box import Box
from pathology.readers.facts.slide_facts import SlideFacts
from pathology.readers.source_level import RGB, Affine, BadTile, SourceLevel


class SlideSource(Protocol):
    """An open slide file. It can be read from threads, and from forked or spawned processes.

    Attributes:
        levels: Finest first. If the file states bounds, pixels are counted from their corner.
        mpp: Microns per pixel (y, x) of the finest level; None if the file states none, or an implausible number.
        bounds: The box of the file's finest level that ``levels`` cover.
        to_file_px: Maps (y, x) of ``levels[0]`` to (y, x) of the file's finest level as stored: adds the corner of the
            bounds, reverts the tag Orientation. For results in the file's coordinates, such as heatmaps and outlines.
        facts: What the file says, and notes on what is not believed.
        vendor: Name of the scanner's maker or of the format.
        objective_power: Magnification of the objective; None if the file does not state it.
        icc: The ICC profile's bytes; None if there is none. It is not applied to pixels here; see
            `pathology.ingest.content`.
    """

    levels: tuple[SourceLevel, ...]
    mpp: tuple[float, float] | None
    bounds: Box
    to_file_px: Affine
    facts: SlideFacts
    vendor: str
    objective_power: float | None
    icc: bytes | None

    def read(self, box: Box, level: int) -> RGB:
        """Return a new ``(h, w, 3)`` uint8 array with the pixels of a box inside the level.

        Raises:
            TileError: A tile in the box cannot be decoded. The source stays usable.
        """

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Write the pixels of a box into an array of the caller.

        Args:
            box: A box inside the level.
            level: Index of the level.
            out: ``(h, w, 3)`` uint8 of any strides, for example a transposed view of planes.
            bad: If given, tiles that cannot be decoded are appended; they are white in ``out``, all others are read.

        Raises:
            TileError: A tile cannot be decoded and ``bad`` is None. The source stays usable.
        """

    def close(self) -> None:
        """Close the file."""
