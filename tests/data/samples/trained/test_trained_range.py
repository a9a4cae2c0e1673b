"""Slides far from those of training are recognised by size, resolution and stain, and others are not."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from data.samples.trained.trained_range import SlideFigures, TrainedRange
from data.store.slide_store import StoreLevel

BLUE, PINK = (0.65, 0.70, 0.29), (0.07, 0.99, 0.11)


def slide(area_mm2: float = 10.0, mpp: float = 0.5, turn: float = 0.0) -> SlideFigures:
    """Return a slide whose haematoxylin is turned by some degrees towards eosin."""
    blue, pink = np.array(BLUE) / np.linalg.norm(BLUE), np.array(PINK)
    across = pink - (pink @ blue) * blue
    turned = math.cos(math.radians(turn)) * blue + math.sin(math.radians(turn)) * across / np.linalg.norm(across)
    return SlideFigures(area_mm2, mpp, {"haematoxylin": tuple(turned.tolist())})


TRAINED = TrainedRange.of([slide(8, 0.25, -2), slide(20, 0.5, 2), slide(12, 0.5)])


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (slide(20 * 18), "18 times the area of the largest"),
        (slide(1), "0.12 times the area of the smallest"),
        (slide(20 * 1600), "1,600 times the area of the largest"),
        (slide(mpp=2.0), "4 times the microns per pixel of the file of the coarsest"),
        (slide(turn=25), "the colour of haematoxylin is 25° from the mean"),
    ],
)
def test_what_is_far_is_named(figures: SlideFigures, said: str) -> None:
    (text,) = TRAINED.describe_outside(figures)
    assert said in text


@pytest.mark.parametrize("figures", [slide(), slide(50), slide(3), slide(turn=8), SlideFigures(), slide(mpp=0.7)])
def test_what_is_near_or_unknown_is_not(figures: SlideFigures) -> None:
    assert TRAINED.describe_outside(figures) == []


def test_ranges_are_stored_and_joined() -> None:
    assert TrainedRange.of_json(json.loads(json.dumps(TRAINED.to_json()))) == TRAINED
    assert TrainedRange.of_json(None).describe_outside(slide(1e9)) == []
    joined = TrainedRange.union([TRAINED, TrainedRange.of([slide(200, turn=20)]), TrainedRange()])
    assert joined.numbers["area_mm2"] == (8, 200)
    assert not joined.describe_outside(slide(150, turn=22))


def test_figures_of_a_slide_are_in_mm2_and_um() -> None:
    levels = (StoreLevel(2000, 3000, (0.5, 0.25), "0"),)
    stains = {"haematoxylin": [1, 0, 0], "eosin": None}
    shown = SimpleNamespace(levels=levels, attributes={"source": {"mpp": [0.5, 0.125]}, "stains": stains})
    figures = SlideFigures.of(SimpleNamespace(slide=lambda index: shown), 0)  # type: ignore[arg-type]
    assert figures.area_mm2 == 0.75 and figures.source_mpp == 0.25
    assert figures.stains == {"haematoxylin": (1.0, 0.0, 0.0)}
