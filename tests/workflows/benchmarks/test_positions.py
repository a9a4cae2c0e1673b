"""The benchmark of positions draws what it says: the class in one tile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pathology.synthetic.anatomy import Anatomy
from workflows.benchmarks.tiles.positions import PositionsTask


@pytest.fixture(scope="module")
def drawn() -> list[tuple[bool, Anatomy, Anatomy]]:
    """Whether it is positive, with all foci and with one tile, for each slide."""
    foci, one = (PositionsTask(2, 1632, 96, 1.0, one) for one in (False, True))
    return [(slide.spec.positive, foci.anatomy(slide), one.anatomy(slide)) for slide in foci.slides]


def test_the_class_is_in_one_tile_of_positive_slides(drawn: list[tuple[bool, Anatomy, Anatomy]]) -> None:
    task = PositionsTask(2, 1632, 96, 1.0, one_tile=True)
    assert {positive for positive, _, _ in drawn} == {False, True}
    assert any((task.tiles_with_class(all_foci) > 0).sum() > 1 for _, all_foci, _ in drawn)
    for positive, all_foci, in_one_tile in drawn:
        before, after = task.tiles_with_class(all_foci), task.tiles_with_class(in_one_tile)
        assert after.shape == (17, 17)
        assert (after > 0).sum() == positive
        assert after.max() == before.max()
        assert np.array_equal(all_foci.nuclei[:, :2], in_one_tile.nuclei[:, :2])


def test_slides_of_other_settings_are_in_another_folder() -> None:
    task = PositionsTask(2, 1632, 96, 1.0, one_tile=True)
    others = [{"count": 4}, {"size_px": 2208}, {"tile_px": 48}, {"one_tile": False}]
    assert len({task.name, *(replace(task, **other).name for other in others)}) == 5
