"""Stain normalisation: the colours of each slide become those of a reference, before augmentation.

The new colour of a pixel depends on its old one and on statistics of its whole slide, never on the box that is read, so
parts of an image that different ranks read fit together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from data.arrays import Pixels
from data.samples.colours import macenko, reinhard
from data.samples.colours.macenko import MacenkoMap
from data.samples.colours.reinhard import LabStatistics, ReinhardMap
from data.samples.colours.slide_colours import MeasuredSlide, glass_of, stains_of, tissue_windows
from hyfi_core.errors import RequestError

StainMethod = Literal["macenko", "reinhard"]
_REFERENCES: Mapping[StainMethod, Mapping[str, tuple[float, ...]]] = {
    "macenko": macenko.REFERENCE,
    "reinhard": reinhard.REFERENCE,
}


class ColourMap(Protocol):
    """The change of one slide's colours, pixel by pixel; white stays white."""

    @property
    def identity(self) -> str:
        """Text of the method and its reference."""
        ...

    def __call__(self, pixels: Pixels) -> Pixels:
        """Return pixels (3, …) uint8 in new colours, a new array."""
        ...


@dataclass(frozen=True)
class StainNormalisation:
    """The method and its reference, as stored in a checkpoint.

    Attributes:
        method: ``macenko`` or ``reinhard``.
        reference: (name, numbers) of the reference; see ``REFERENCE`` of `macenko` and `reinhard`.
    """

    method: StainMethod
    reference: tuple[tuple[str, tuple[float, ...]], ...]

    @classmethod
    def of(
        cls, method: Literal["none", "macenko", "reinhard"], reference: Mapping[str, tuple[float, ...]] | None = None
    ) -> StainNormalisation | None:
        """Return the normalisation to a reference, by default the method's published one; None for ``none``."""
        return None if method == "none" else cls(method, tuple((reference or _REFERENCES[method]).items()))

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> StainNormalisation | None:
        """Build from the ``stain_normalisation`` of ``model.json``; None: there is none, as in older checkpoints.

        Raises:
            RequestError: The method is unknown, or the reference lacks numbers.
        """
        if not value:
            return None
        method, reference = value["method"], value["reference"]
        if method not in _REFERENCES:
            raise RequestError(
                f"model.json: stain_normalisation of method {method!r}; known are {', '.join(_REFERENCES)}; use the "
                f"version of hyfi that wrote it"
            )
        names = _REFERENCES[cast(StainMethod, method)]
        if set(reference) != set(names):
            raise RequestError(
                f"model.json: stain_normalisation has a reference of {', '.join(reference)}; needed: "
                f"{', '.join(names)}; use another checkpoint"
            )
        # In the order of ``REFERENCE``, not of the file: the text of `identity` must be the same.
        return cls(method, tuple((name, tuple(map(float, reference[name]))) for name in names))

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` takes."""
        return {"method": self.method, "reference": {name: list(numbers) for name, numbers in self.reference}}

    def __str__(self) -> str:
        """Return method and reference in a line."""
        return f"{self.method} to " + ", ".join(f"{name} {list(numbers)}" for name, numbers in self.reference)

    def of_slide(self, slide: MeasuredSlide, name: str) -> ColourMap | None:
        """Measure a slide and return the change of its colours; None: its stains cannot be measured.

        Reads the level of about 8 µm per pixel and, for Reinhard's method, up to 64 windows at about 1 µm per pixel.

        Raises:
            StoreError: A file of the store is missing or damaged.
            RequestError: The stored slide has stains, but the sample of its tissue has not.
        """
        stains = stains_of(slide)
        if stains is None:
            return None
        glass, reference = glass_of(slide), dict(self.reference)
        if self.method == "macenko":
            return MacenkoMap.of(stains, glass, reference, identity=str(self))
        statistics = LabStatistics.of(tissue_windows(slide), glass)
        if statistics is None:
            raise RequestError(
                f"data.stain_normalisation: given reinhard; slide {name} has too little stained tissue to measure its "
                f"colours; leave the slide out, or use macenko"
            )
        return ReinhardMap.of(statistics, glass, reference, identity=str(self))


def as_scanned_text(slides: Sequence[str]) -> str:
    """Return a warning that stain normalisation leaves these slides (at least one) as they are."""
    more = f" and {len(slides) - 5} more" if len(slides) > 5 else ""
    return (
        f"stain normalisation leaves slides as scanned, because their two stains could not be measured (too little "
        f"tissue, or one stain only): {', '.join(slides[:5])}{more}; look at them, or leave them out of the splits"
    )
