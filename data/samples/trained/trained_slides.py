"""The slides that a model was trained on, as digests in its checkpoint, so that predictions of them are recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from data.samples.dataset import SlideDataset
from data.samples.trained.trained_range import SlideFigures, TrainedRange

_DIGITS = 16
"""Hexadecimal digits of a digest: two of a million slides have the same one with a chance of 1 in 37 million."""


@dataclass(frozen=True)
class TrainedSlides:
    """Digests of names, cases and files of training slides: names of patients do not leave a site with a checkpoint.

    Attributes:
        slides: ``name:file``, digests of each slide's name and file; ``name:`` if the file is unknown.
        cases: Digests of the names of their cases.
        ranges: Their sizes, resolutions and stains.
    """

    slides: frozenset[str] = frozenset()
    cases: frozenset[str] = frozenset()
    ranges: TrainedRange = field(default_factory=TrainedRange)

    @classmethod
    def of(cls, dataset: SlideDataset) -> Self:
        """Return the slides of a dataset; opens each, but reads no pixels."""
        samples = dataset.samples
        contents = [source_sha256(dataset, index) for index in range(len(samples))]
        slides = (_entry(sample.slide_id, content) for sample, content in zip(samples, contents, strict=True))
        figures = [SlideFigures.of(dataset, index) for index in range(len(samples))]
        cases = frozenset(_digest(sample.case_id) for sample in samples if sample.case_id)
        return cls(frozenset(slides), cases, TrainedRange.of(figures))

    @classmethod
    def of_json(cls, value: Mapping[str, Any] | None) -> Self:
        """Return the slides of a ``model.json``'s ``trained_on``; None: unknown, as of older checkpoints."""
        if value is None:
            return cls()
        return cls(frozenset(value["slides"]), frozenset(value["cases"]), TrainedRange.of_json(value.get("ranges")))

    @classmethod
    def union(cls, models: Iterable[TrainedSlides]) -> Self:
        """Return the slides of any of several models."""
        models = list(models)
        slides = frozenset(entry for model in models for entry in model.slides)
        cases = frozenset(case for model in models for case in model.cases)
        return cls(slides, cases, TrainedRange.union(model.ranges for model in models))

    def to_json(self) -> dict[str, Any]:
        """Return what ``of_json`` takes."""
        return {"slides": sorted(self.slides), "cases": sorted(self.cases), "ranges": self.ranges.to_json()}

    def has(self, slide_id: str, case_id: str, sha256: str) -> bool:
        """Whether the model was trained on a slide: one with the same case, the same file, or the same name.

        The same name counts only if one of the two files is unknown: many archives have a slide ``1``.

        Args:
            slide_id: Name of the slide.
            case_id: Case of the slide; empty if unknown.
            sha256: Digest of the slide's file; empty if unknown.
        """
        if case_id and _digest(case_id) in self.cases:
            return True
        # The digests of the slide's name and of its file, ``content``; the latter is empty if unknown.
        name, content = _entry(slide_id, sha256).split(":")
        # The file first: a copy of a training slide under another name is the same slide.
        if content in self._files:
            return True
        # Different files with one name are different slides: if this file is known, its name counts only for training
        # slides whose file is unknown.
        return name in self._names_without_file if content else name in self._names

    @cached_property
    def _entries(self) -> list[list[str]]:
        return [entry.split(":") for entry in self.slides]

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(file for _, file in self._entries if file)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._entries)

    @cached_property
    def _names_without_file(self) -> frozenset[str]:
        """Names of slides whose file is unknown."""
        return frozenset(name for name, file in self._entries if not file)


def source_sha256(dataset: SlideDataset, index: int) -> str:
    """Return the digest of the file that a slide of a dataset was ingested from; empty if unknown."""
    return str(getattr(dataset.slide(index), "attributes", {}).get("sha256") or "")


def _entry(slide_id: str, sha256: str) -> str:
    return f"{_digest(slide_id)}:{sha256[:_DIGITS]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]
