"""Intervals of few cases: they hold what they promise, or there are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workflows.tasks.bootstrap import draw_cases, intervals, wilson


def test_three_cases_without_an_error_have_no_certain_metric() -> None:
    logits, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 1])
    found = intervals(logits, targets, torch.rand(3), draw_cases(3))
    assert found["auroc"] is None and found["balanced_accuracy"] is None
    assert found["accuracy"] == pytest.approx([0.4385, 1.0], abs=1e-4)  # Wilson's of 3 of 3


def test_slides_of_one_case_count_once() -> None:
    logits, targets = torch.tensor([[2.0, 0.0]] * 6), torch.tensor([0, 0, 0, 1, 1, 1])
    of_case = torch.tensor([0, 0, 0, 1, 1, 2])
    found = intervals(logits, targets, torch.rand(6), draw_cases(3)[:, of_case])
    assert found["accuracy"] == pytest.approx(wilson(0.5, 3))


@pytest.mark.parametrize("cases", [3, 10, 30, 100])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_the_interval_of_a_share_contains_it_as_often_as_it_says(cases: int, share: float) -> None:
    counted = np.random.default_rng(cases).binomial(cases, share, 4000)
    inside = [low <= share <= high for low, high in (wilson(k / cases, cases) for k in counted)]
    assert np.mean(inside) >= 0.92
