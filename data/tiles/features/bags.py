"""Slides of a dataset as bags of stored features."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from data.samples.coverage import MAX_LISTED
from data.samples.dataset import SlideDataset, SlideRef
from data.store.slide_store import SlideStore
from data.tiles.bags import tissue_seen
from data.tiles.features.placed import check_slide, level0_corners, placed_tiles, tile_um
from data.tiles.features.source import FeatureTiles
from data.tiles.features.stored import StoredFeatures
from data.tiles.recent import Recent
from hyfi_core.errors import RequestError

SCALE_TOLERANCE = 1.25
"""Largest ratio of the sides of tiles, in µm, of two slides: the mpp of scanners at one magnification differs so."""
_COORDS_BYTES = 2**26
"""Bytes of tiles' positions that stay in memory."""


class FeatureBags:
    """The stored features of each slide of a dataset. Only shapes and attributes are in memory, and some positions.

    Args:
        dataset: The slides.
        stored: Slide id -> its features.
        missing: Slide id -> why the slide has no features, if that is known.

    Raises:
        RequestError: A slide has no features; the message names such slides.
    """

    def __init__(
        self, dataset: SlideDataset, stored: Mapping[str, StoredFeatures], missing: Mapping[str, str] | None = None
    ) -> None:
        self.dataset = dataset
        names = [sample.slide_id for sample in dataset.samples]
        lacking = [name for name in names if name not in stored]
        if lacking:
            raise RequestError(_describe_missing(lacking, len(names), stored, missing or {}))
        self.stored = tuple(stored[name] for name in names)
        self._sources = Recent(_COORDS_BYTES, _bytes_of)

    @property
    def samples(self) -> tuple[SlideRef, ...]:
        """The slides."""
        return self.dataset.samples

    def __len__(self) -> int:
        """Return the number of slides."""
        return len(self.stored)

    def slide(self, index: int) -> SlideStore:
        """Return the open slide, whose pixels are not read."""
        slide = self.dataset.slide(index)
        assert isinstance(slide, SlideStore), "positions refer to stores"
        return slide

    def count(self, index: int) -> int:
        """Return the number of tiles of a slide."""
        return self.stored[index].count

    def of(self, index: int, epoch: int | None = None) -> FeatureTiles:
        """Return the features of a slide, the same in every epoch; positions in level-0 pixels.

        Raises:
            RequestError: The file is damaged.
        """
        stored = self.stored[index]
        return self._sources.get(index, lambda: FeatureTiles(stored, level0_corners(stored, self.slide(index))))

    def coverage(self, index: int) -> float | None:
        """Return the share of a slide's tissue that is in its tiles; None if positions are not known."""
        return self._seen(index)[0]

    def sides_um(self) -> dict[str, float]:
        """Return height and width of a tile in micrometres for each slide whose file states them."""
        sides = {one.slide_id: tile_um(one, self.slide(index)) for index, one in enumerate(self.stored)}
        return {name: side for name, side in sides.items() if side is not None}

    def check(self) -> list[dict[str, Any]]:
        """Return a row of ``coverage.csv`` for each slide: the share of its tissue in tiles, and their number.

        Raises:
            RequestError: Features belong to another slide, or tiles of slides differ in size; the message names them.
        """
        faults = []
        for index, stored in enumerate(self.stored):
            try:
                check_slide(stored, self.slide(index))
            except RequestError as error:
                faults.append(str(error))
        if faults:
            raise RequestError(_listed("features do not belong to their slides", faults))
        check_sides(self.sides_um())
        return [self._row(index) for index in range(len(self))]

    def _row(self, index: int) -> dict[str, Any]:
        """Return a slide's row of the coverage table."""
        (coverage, tissue_px), sample = self._seen(index), self.dataset.samples[index]
        return {
            "slide_id": sample.slide_id,
            "case_id": sample.case_id,
            "coverage": coverage,
            "tissue_px": tissue_px,
            "flags": "",
            "pieces": self.count(index),
            "fits_size_px": None,
            "fits_mpp": None,
        }

    def _seen(self, index: int) -> tuple[float | None, int | None]:
        """Return `tissue_seen` of a slide; None and None if positions are not known."""
        slide = self.slide(index)
        tiles = placed_tiles(self.stored[index], slide)
        return (None, None) if tiles is None else tissue_seen(*slide.tissue(), tiles)


def check_sides(sides_um: Mapping[str, float], usual_um: float | None = None) -> None:
    """Check that tiles of all slides have about the same size in micrometres.

    Args:
        sides_um: Slide id -> height and width of a tile.
        usual_um: The expected height and width; None: the median of ``sides_um``.

    Raises:
        RequestError: Some differ; the message names these slides.
    """
    # The median, which one slide of another resolution does not change.
    usual = usual_um or median(sides_um.values() or [1.0])
    off = {name: side for name, side in sides_um.items() if not 1 / SCALE_TOLERANCE <= side / usual <= SCALE_TOLERANCE}
    if off:
        faults = [f"slide {name}: tiles of {side:.4g} × {side:.4g} µm" for name, side in off.items()]
        where = "elsewhere" if usual_um is None else "in training"
        if len(off) == 1 and usual_um is not None:
            raise RequestError(f"{faults[0]}, but {usual:.4g} × {usual:.4g} µm {where}")
        raise RequestError(
            _listed(f"tiles are not of one resolution, which is {usual:.4g} × {usual:.4g} µm {where}", faults)
        )


def _describe_missing(
    lacking: list[str], slides: int, stored: Mapping[str, StoredFeatures], why: Mapping[str, str]
) -> str:
    """Return the message about slides without features; ``why``: slide -> the reason, if known."""
    folder = next(iter(stored.values())).path.parent
    lines = [f"slide {name}{f': {why[name]}' if name in why else ''}" for name in lacking]
    count = "1 slide has no features" if len(lacking) == 1 else f"{len(lacking)} slides have no features"
    example = next(iter(stored))
    named = f" (its files are named after slides, such as {example})" if len(lacking) == slides else ""
    return _listed(f"{count} in {folder}{named}", lines) + (
        "\nRun hyfi features for them, or leave them out of the splits: no slide is dropped silently"
    )


def _listed(what: str, lines: list[str]) -> str:
    """Return a message about ``what`` with the first lines, and the number of further ones."""
    shown = [f"  {line}" for line in lines[:MAX_LISTED]]
    shown += [f"  … and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return f"data.features: {what}:\n" + "\n".join(shown)


def _bytes_of(source: FeatureTiles) -> int:
    return 0 if source.coords is None else source.coords.nbytes
