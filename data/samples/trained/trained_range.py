"""Ranges of the training slides' sizes, resolutions and stains, by which slides far outside of them are recognised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from data.samples.dataset import SlideDataset

_AREA_FACTOR, _MPP_FACTOR = 3.0, 1.5
"""Largest factor by which a slide may be larger or smaller (coarser or finer) than all training slides."""
_STAIN_FACTOR, _STAIN_DEGREES = 1.5, 10.0
"""Largest allowed angle of a stain to the mean of training: this factor times that of training, plus these degrees."""
_STAINS = ("haematoxylin", "eosin")
_NUMBERS = ("area_mm2", "source_mpp")
Vector = tuple[float, ...]


@dataclass(frozen=True)
class StainRange:
    """The optical densities of one stain: unit vectors, at most ``degrees`` from ``mean``."""

    mean: Vector
    degrees: float

    @classmethod
    def of(cls, vectors: Sequence[Vector]) -> Self:
        """Return the smallest range around the mean of ``vectors``; there is at least one."""
        mean = _unit([sum(numbers) for numbers in zip(*vectors, strict=True)])
        return cls(mean, max(_degrees(mean, one) for one in vectors))

    @classmethod
    def union(cls, ranges: Sequence[StainRange]) -> Self:
        """Return a range that contains all of ``ranges``."""
        mean = _unit([sum(numbers) for numbers in zip(*(one.mean for one in ranges), strict=True)])
        # By the triangle inequality, every vector of a range is within this angle of the new mean.
        return cls(mean, max(one.degrees + _degrees(mean, one.mean) for one in ranges))


@dataclass(frozen=True)
class SlideFigures:
    """Figures of a slide that are known without reading its pixels; empty or NaN if unknown.

    Attributes:
        area_mm2: Area of the whole slide as it is stored.
        source_mpp: Microns per pixel of the file.
        stains: Name -> optical density of (red, green, blue), a vector of length 1.
    """

    area_mm2: float = math.nan
    source_mpp: float = math.nan
    stains: Mapping[str, Vector] = field(default_factory=dict)

    @classmethod
    def of(cls, dataset: SlideDataset, index: int) -> Self:
        """Return the figures of a slide of a dataset; opens it."""
        slide = dataset.slide(index)
        attributes: Mapping[str, Any] = getattr(slide, "attributes", {})
        mpp = (attributes.get("source") or {}).get("mpp")
        stains = attributes.get("stains") or {}
        finest = slide.levels[0]
        area = finest.height_px * finest.width_px * finest.mpp[0] * finest.mpp[1] / 1e6
        known = {name: tuple(map(float, stains[name])) for name in _STAINS if stains.get(name)}
        # The geometric mean of y and x: the side of a square pixel with the same area.
        return cls(area, math.nan if mpp is None else math.sqrt(float(mpp[0]) * float(mpp[1])), known)


@dataclass(frozen=True)
class TrainedRange:
    """Ranges of the training slides' figures; figures that no slide has are left out.

    Attributes:
        numbers: ``area_mm2`` and ``source_mpp`` -> (least, greatest).
        stains: Name of a stain -> its range.
    """

    numbers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    stains: Mapping[str, StainRange] = field(default_factory=dict)

    @classmethod
    def of(cls, slides: Sequence[SlideFigures]) -> Self:
        """Return the ranges of some slides."""
        columns = {name: [v for one in slides if math.isfinite(v := getattr(one, name))] for name in _NUMBERS}
        vectors = {name: [one.stains[name] for one in slides if name in one.stains] for name in _STAINS}
        return cls(
            {name: (min(values), max(values)) for name, values in columns.items() if values},
            {name: StainRange.of(values) for name, values in vectors.items() if values},
        )

    @classmethod
    def union(cls, ranges: Iterable[TrainedRange]) -> Self:
        """Return ranges that contain all of ``ranges``."""
        ranges = list(ranges)
        # Of each number, the (least, most) of every range that has it.
        pairs = {name: [one.numbers[name] for one in ranges if name in one.numbers] for name in _NUMBERS}
        stains = {name: [one.stains[name] for one in ranges if name in one.stains] for name in _STAINS}
        return cls(
            {name: (min(v[0] for v in own), max(v[1] for v in own)) for name, own in pairs.items() if own},
            {name: StainRange.union(own) for name, own in stains.items() if own},
        )

    @classmethod
    def of_json(cls, value: Mapping[str, Any] | None) -> Self:
        """Return the ranges of ``to_json``; None: unknown, as of older checkpoints."""
        ranges = value or {}
        ranges_of_stains = ranges.get("stains", {}).items()
        stains = {name: StainRange(tuple(one["mean"]), one["degrees"]) for name, one in ranges_of_stains}
        return cls({name: (ranges[name][0], ranges[name][1]) for name in _NUMBERS if name in ranges}, stains)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        stains = {name: {"mean": list(one.mean), "degrees": one.degrees} for name, one in self.stains.items()}
        return {**{name: list(pair) for name, pair in self.numbers.items()}, **({"stains": stains} if stains else {})}

    def describe_outside(self, slide: SlideFigures) -> list[str]:
        """Return a sentence for each figure of a slide that is far outside the ranges; empty if none is."""
        sentences = []
        for name, factor, text, ends in (
            ("area_mm2", _AREA_FACTOR, "the area", ("smallest", "largest")),
            ("source_mpp", _MPP_FACTOR, "the microns per pixel of the file", ("finest", "coarsest")),
        ):
            value = getattr(slide, name)
            if name not in self.numbers or not math.isfinite(value):
                continue
            least, most = self.numbers[name]
            if value > factor * most:
                sentences.append(f"{_rounded(value / most)} times {text} of the {ends[1]} training slide")
            elif value * factor < least:
                sentences.append(f"{_rounded(value / least)} times {text} of the {ends[0]} training slide")
        for name, stain in self.stains.items():
            if name in slide.stains:
                degrees = _degrees(stain.mean, slide.stains[name])
                if degrees > _STAIN_FACTOR * stain.degrees + _STAIN_DEGREES:
                    sentences.append(
                        f"the colour of {name} is {degrees:.0f}° from the mean of training, where {stain.degrees:.0f}° "
                        "was the farthest"
                    )
        return sentences


def _rounded(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 100 else f"{ratio:,.0f}"


def _unit(vector: Sequence[float]) -> Vector:
    """Return a vector of length 1 in the same direction."""
    # The zero vector stays as it is.
    length = math.sqrt(sum(number**2 for number in vector)) or 1.0
    return tuple(number / length for number in vector)


def _degrees(one: Vector, other: Vector) -> float:
    """Return the angle between two unit vectors."""
    # By rounding, the product of two equal unit vectors may be larger than 1, where acos is undefined.
    return math.degrees(math.acos(max(-1.0, min(1.0, sum(a * b for a, b in zip(one, other, strict=True))))))
