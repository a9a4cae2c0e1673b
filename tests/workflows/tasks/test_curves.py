"""Curves, tables and bands of a cohort, against the definitions and torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workflows.tasks.bootstrap import draw_cases
from workflows.tasks.curves import (
    GRID,
    confusion,
    precision_recall_curve,
    reliability,
    roc_curve,
    threshold_rows,
)


def slides(count: int = 300, seed: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Scores with ties, and whether the slides are positive."""
    rng = np.random.default_rng(seed)
    positive = rng.random(count) < 0.4
    return np.round((rng.normal(positive * 1.2, 1.0) + 4) / 8, 2).clip(0, 1), positive


def test_areas_are_those_of_torchmetrics_ties_included() -> None:
    # Imported here: it takes three seconds, in each process that collects tests.
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    score, positive = slides()
    draws = draw_cases(len(score), 50).numpy()
    roc, found = roc_curve(score, positive, draws), precision_recall_curve(score, positive, draws)
    assert roc is not None and found is not None
    given = (torch.from_numpy(score), torch.from_numpy(positive).long())
    assert roc.area == pytest.approx(float(binary_auroc(*given)), abs=1e-6)
    assert found.area == pytest.approx(float(binary_average_precision(*given)), abs=1e-6)


def test_a_band_is_what_draws_of_the_cases_give() -> None:
    score, positive = slides()
    draws = draw_cases(len(score), 80).numpy()
    curve = roc_curve(score, positive, draws)
    assert curve is not None and curve.low is not None and curve.high is not None
    at = 30
    rates = []
    for counts in draws.astype(int):
        drawn, truth = np.repeat(score, counts), np.repeat(positive, counts)
        levels = np.unique(drawn)[::-1]
        alarms = [0.0, *((drawn[~truth] >= level).mean() for level in levels)]
        hits = [0.0, *((drawn[truth] >= level).mean() for level in levels)]
        rates.append(np.interp(GRID[at], alarms, hits))
    assert curve.low[at] == pytest.approx(np.quantile(rates, 0.025))
    assert curve.high[at] == pytest.approx(np.quantile(rates, 0.975))


def test_one_kind_of_slides_has_no_curve() -> None:
    score, _ = slides(10)
    draws = draw_cases(10, 5).numpy()
    assert roc_curve(score, np.ones(10, bool), draws) is None
    assert precision_recall_curve(score, np.zeros(10, bool), draws) is None


def test_tables_count_slides() -> None:
    score = np.array([0.9, 0.8, 0.5, 0.1])
    positive = np.array([True, False, True, False])
    rows = {row.threshold: row for row in threshold_rows(score, positive)}
    assert (rows[0.5].positives, rows[0.5].sensitivity, rows[0.5].specificity) == (3, 1.0, 0.5)
    assert rows[0.5].precision == pytest.approx(2 / 3) and rows[0.5].negative_value == 1.0
    assert rows[0.95].precision is None and rows[0.95].sensitivity == 0.0
    counts = confusion(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0]), 3)
    np.testing.assert_array_equal(counts, [[1, 1, 0], [0, 1, 0], [1, 0, 0]])


def test_reliability_gives_the_calibration_error() -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error

    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet([1.0, 1.0, 1.0], 400)
    targets = rng.integers(0, 3, 400)
    mean, right, counts = reliability(probabilities, targets)
    error = np.nansum(np.abs(mean - right) * counts) / counts.sum()
    wanted = multiclass_calibration_error(torch.from_numpy(probabilities), torch.from_numpy(targets), 3, n_bins=10)
    assert error == pytest.approx(float(wanted), abs=1e-6)
