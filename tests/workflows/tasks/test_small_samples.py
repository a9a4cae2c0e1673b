"""Intervals of few cases: they hold what they promise, or there are none."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch

from workflows.tasks.area_interval import area_interval
from workflows.tasks.bootstrap import draw_cases, intervals, wilson


def test_three_cases_without_an_error_have_no_certain_metric() -> None:
    logits, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 1])
    found = intervals(logits, targets, torch.rand(3), draw_cases(3))
    assert found["balanced_accuracy"] is None
    assert found["auroc"] == pytest.approx(area_interval(1.0, 2, 1))
    assert found["accuracy"] == pytest.approx([0.4385, 1.0], abs=1e-4)  # Wilson's of 3 of 3


def test_slides_of_one_case_count_once() -> None:
    logits, targets = torch.tensor([[2.0, 0.0]] * 6), torch.tensor([0, 0, 0, 1, 1, 1])
    of_case = torch.tensor([0, 0, 0, 1, 1, 2])
    found = intervals(logits, targets, torch.rand(6), draw_cases(3)[:, of_case])
    assert found["accuracy"] == pytest.approx(wilson(0.5, 3))
    assert found["auroc"] == pytest.approx(area_interval(0.5, 2, 1))
    alone = intervals(logits, targets, torch.rand(6), draw_cases(1)[:, torch.zeros(6, dtype=torch.long)])
    assert alone["auroc"] is None  # one patient


@pytest.mark.parametrize("cases", [3, 10, 30, 100])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_the_interval_of_a_share_contains_it_as_often_as_it_says(cases: int, share: float) -> None:
    counted = np.random.default_rng(cases).binomial(cases, share, 4000)
    inside = [low <= share <= high for low, high in (wilson(k / cases, cases) for k in counted)]
    assert np.mean(inside) >= 0.92


@pytest.mark.parametrize("cases", [3, 10, 30, 100])
@pytest.mark.parametrize("prevalence", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("area", [0.7, 0.9])
def test_the_interval_of_an_auroc_contains_it_as_often_as_it_says(cases: int, prevalence: float, area: float) -> None:
    """Normal scores whose classes are as far apart as the area asks; draws without one of the classes do not count."""
    random, apart = np.random.default_rng(cases), NormalDist().inv_cdf(area) * 2**0.5
    inside = []
    for _ in range(400):
        positive = random.random(cases) < prevalence
        scores = random.normal(size=cases) + apart * positive
        if 0 < positive.sum() < cases:
            found = float((scores[positive][:, None] > scores[~positive]).mean())
            low, high = area_interval(found, int(positive.sum()), int((~positive).sum()))
            inside.append(low <= area <= high)
    assert np.mean(inside) >= 0.92


def test_the_interval_of_an_auroc_is_symmetric_and_narrows() -> None:
    low, high = area_interval(0.8, 12, 30)
    assert [1 - high, 1 - low] == pytest.approx(area_interval(0.2, 12, 30))
    assert low < 0.8 < high and area_interval(0.8, 120, 300)[0] > low

    bound, n = area_interval(1.0, 22, 22)[0], 22  # as many of each class: exactly the error of Hanley and McNeil 1982
    first, second = bound / (2 - bound), 2 * bound**2 / (1 + bound)
    variance = (bound * (1 - bound) + (n - 1) * (first - bound**2) + (n - 1) * (second - bound**2)) / n**2
    assert 1 - bound == pytest.approx(NormalDist().inv_cdf(0.975) * variance**0.5)
