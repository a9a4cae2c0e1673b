"""Options of ingest."""

from __future__ import annotations

import pytest

from pathology.errors import SlideError
from pathology.ingest.options import IngestOptions


@pytest.mark.parametrize("scene", ["0", "00", "-1", "1.0", "first"])
def test_a_scene_of_a_manifest_is_a_number_from_1(scene: str) -> None:
    """0 was taken for no statement, and all scenes became one slide."""
    with pytest.raises(SlideError, match="expected a number from 1"):
        IngestOptions().pick({"scene": scene})


def test_a_manifest_need_not_state_a_scene() -> None:
    assert IngestOptions().pick({}).scene == IngestOptions().pick({"scene": " "}).scene == 0
    assert IngestOptions().pick({"scene": " 2 "}).scene == 2
