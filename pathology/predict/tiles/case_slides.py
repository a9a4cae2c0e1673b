"""The slides of a case, for models that take all tiles of a case as one bag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pathology.predict.inputs import SlideInput

_NAMED = 5
"""Slides in a message."""


def with_case_slides(inputs: Sequence[SlideInput]) -> list[SlideInput]:
    """Return the slides with ``case_slides`` set, sorted by case; cases are in the order of their first slides.

    If a slide of a case cannot be read or is not in a store, all slides of the case get this as ``failure``, because a
    part of a case would be another bag. If all slides have ``case_slides`` already, they are returned unchanged.
    """
    if all(slide.case_slides for slide in inputs):
        return list(inputs)
    cases: dict[str, list[SlideInput]] = {}
    for slide in inputs:
        cases.setdefault(slide.case_id or slide.slide_id, []).append(slide)
    result = []
    for slides in cases.values():
        # Sorted as in training, see `Grouping.of`.
        paths = tuple(slide.path for slide in sorted(slides, key=lambda slide: slide.slide_id))
        why = "" if len(slides) == 1 else _reason(slides)
        result += [replace(slide, case_slides=paths, failure=slide.failure or why) for slide in slides]
    return result


def alone_note(inputs: Sequence[SlideInput]) -> str:
    """Return a note that slides whose case is unknown are predicted alone; empty if there are none."""
    alone = [slide.slide_id for slide in inputs if not slide.case_id]
    if not alone:
        return ""
    names = ", ".join(alone[:_NAMED]) + (f" and {len(alone) - _NAMED} more" if len(alone) > _NAMED else "")
    return (
        f"the model takes all slides of a case together, but the case of {names} is unknown: predicted as a case of "
        f"one slide; a store that was ingested from a manifest with case_id knows it"
    )


def _reason(slides: Sequence[SlideInput]) -> str:
    """Return why a case with several slides cannot be predicted; empty if it can."""
    failed = next((slide for slide in slides if slide.failure), None)
    if failed is not None:
        return f"the model takes all slides of a case together, and slide {failed.slide_id} fails: {failed.failure}"
    file = next((slide for slide in slides if not slide.stored), None)
    if file is not None:
        return (
            f"the model takes all {len(slides)} slides of case {file.case_id} together, which must be in a store; run "
            f"`hyfi ingest`, and predict the store"
        )
    return ""
