"""What a checkpoint says of slides: their flags, and the reason of those that are far from training."""

from __future__ import annotations

from data.samples.trained.trained_notes import OUTSIDE, TRAINED_ON, TrainedNotes


def test_flags_and_reasons_are_those_of_the_slide() -> None:
    notes = TrainedNotes(("a", "b"), {"b": "18 times the area", "c": "4 times the area"})
    assert [notes.flags(name) for name in "abcd"] == [(TRAINED_ON,), (OUTSIDE, TRAINED_ON), (OUTSIDE,), ()]
    assert [notes.reason(name) for name in "acd"] == ["", f"{OUTSIDE}: 4 times the area", ""]
