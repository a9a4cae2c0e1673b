"""Slides of the benchmark of one tile have the class in one tile, and the measures are those of known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from workflows.benchmarks.tiles.one_tile import TILE_PX, OneTileSlide, batches, draw_slide, judge, sampled


@pytest.fixture(scope="module")
def drawn() -> list[OneTileSlide]:
    """A slide without the class, and one with it."""
    return [draw_slide(index, 1) for index in (0, 1)]


def test_positive_slides_have_the_class_in_one_tile(drawn: list[OneTileSlide]) -> None:
    assert [slide.label for slide in drawn] == [0, 1]
    assert [int(slide.with_class.sum()) for slide in drawn] == [0, 1]
    assert all(len(slide) > 100 and len(slide) == len(slide.with_class) for slide in drawn)
    assert drawn[1].read([0]).shape == (1, 3, TILE_PX, TILE_PX)


def test_the_nucleus_is_drawn_into_that_tile_alone(drawn: list[OneTileSlide]) -> None:
    more = draw_slide(1, 7)  # the same slide with more nuclei of the class
    assert np.array_equal(more.with_class, drawn[1].with_class)
    one, seven = (slide.read(range(len(slide))) for slide in (drawn[1], more))
    changed = (one != seven).flatten(1).any(1).numpy()
    assert changed[one_tile := int(drawn[1].with_class.argmax())]
    assert changed.sum() <= 9 and one_tile in np.flatnonzero(changed)  # nuclei at its edge reach into neighbours


def test_a_sample_has_its_own_truth(drawn: list[OneTileSlide]) -> None:
    few = sampled(drawn[1], 20, np.random.default_rng(0))
    assert len(few) == len(few.with_class) == 20
    assert sampled(drawn[1], 0, np.random.default_rng(0)) is drawn[1]


def test_an_epoch_has_each_slide_once() -> None:
    slides = [OneTileSlide(torch.zeros((1, 3, 2, 2)), np.zeros(1, np.bool_), str(n)) for n in range(6)]
    order = batches(slides, 2, 0)
    names = [[slide.identity for _ in range(3) for slide in next(order)] for _ in range(2)]
    assert sorted(names[0]) == sorted(names[1]) == list("012345")
    assert names[0] != names[1]


class _Brightness(nn.Module):
    """The mean of each tile, as a vector of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles.mean((1, 2, 3))[:, None] * self.scale


class _Brightest(nn.Module):
    """Attention on bright tiles, or with a negative ``sign`` on dark ones; the logit is the highest."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = nn.Parameter(torch.tensor([sign]))

    def forward(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = vectors.flatten() * self.sign
        return torch.stack([scores.max() * 0, scores.max()]), scores.softmax(0)


@pytest.mark.parametrize(("sign", "hits", "of_tiles"), [(1.0, 1.0, 1.0), (-1.0, 0.0, 0.0)])
def test_measures_of_attention_on_the_right_tile_and_on_the_others(sign: float, hits: float, of_tiles: float) -> None:
    def slide(label: int) -> OneTileSlide:
        tiles, truth = torch.full((5, 3, 4, 4), 0.2), np.zeros(5, np.bool_)
        if label:
            tiles[3], truth[3] = 0.9, True
        return OneTileSlide(tiles, truth, f"made-{label}")

    found = judge(_Brightness(), _Brightest(sign), [slide(0), slide(1)])
    assert found["hits"] == hits and found["auroc_of_tiles"] == of_tiles
    assert found["auroc"] == (1.0 if sign > 0 else 0.5)
