"""Samples of a run: each slide is one, or all slides of a case together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from data.samples.dataset import SlideRef
from data.samples.labels import Target
from hyfi_core.errors import RequestError

SampleUnit = Literal["slide", "case"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Grouping:
    """Slides of a dataset as samples.

    ::

        slides    0: A1   1: B1   2: A2          cases of A and B
        members   (0, 2), (1,)                   samples  A1, B1: the first slide of each

    Attributes:
        members: For each sample, the indices of its slides; samples are in the order of their first slides.
        samples: For each sample, its first slide, whose label all slides of the sample have.
    """

    members: tuple[tuple[int, ...], ...]
    samples: tuple[SlideRef, ...]

    @classmethod
    def of(cls, slides: Sequence[SlideRef], unit: SampleUnit) -> Self:
        """Return samples of one slide, or of all slides of a case in the order of their names, as ``unit`` says.

        Raises:
            RequestError: Slides of a case have different labels; the message names cases, slides and labels.
        """
        if unit == "slide":
            return cls(tuple((index,) for index in range(len(slides))), tuple(slides))
        cases: dict[str, list[int]] = {}
        for index, slide in enumerate(slides):
            cases.setdefault(slide.case_id or slide.slide_id, []).append(index)
        # By name, so that the bag does not depend on the order of the manifest's rows.
        groups = [tuple(sorted(indices, key=lambda k: slides[k].slide_id)) for indices in cases.values()]
        faults = [text for indices in groups if (text := _difference([slides[k] for k in indices]))]
        if faults:
            raise RequestError(
                f"data.bag: case: all slides of a case are one sample, which has one label, but {'; '.join(faults[:5])}"
                + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
                + ". Correct the labels, key them by case_id, or use data.bag=slide"
            )
        return cls(tuple(groups), tuple(slides[indices[0]] for indices in groups))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.members)

    @property
    def slides(self) -> int:
        """Number of slides."""
        return sum(map(len, self.members))

    def to_slides(self, values: Sequence[Value]) -> list[Value]:
        """Return, for each slide, the value of its sample."""
        of_slide = {index: value for indices, value in zip(self.members, values, strict=True) for index in indices}
        return [of_slide[index] for index in range(self.slides)]


def _difference(slides: Sequence[SlideRef]) -> str:
    """Return how the labels of the slides of a case differ; empty if they do not."""
    first = slides[0]
    other = next((slide for slide in slides if not _equal(slide.label, first.label)), None)
    if other is None:
        return ""
    return f"case {first.case_id}: {first.slide_id} has {first.label}, {other.slide_id} has {other.label}"


def _equal(one: Target | None, other: Target | None) -> bool:
    """Whether two labels are the same; NaN, a missing number, equals NaN."""
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return one == other
    return len(one) == len(other) and all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))
