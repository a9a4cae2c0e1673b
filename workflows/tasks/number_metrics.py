"""Metrics of predicted numbers, of many draws from the samples at once."""

from __future__ import annotations

import torch


def number_metrics(predicted: torch.Tensor, true: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the metrics of each bootstrap draw, (draws,) each; NaN if undefined.

    ``mae``: mean absolute error. ``rmse``: root of the mean squared error. ``r2``: 1 − squared errors / squared
    deviations from the mean of the true values. ``spearman``: correlation of ranks, equal values sharing their mean
    rank.

    Args:
        predicted: (N,) float64.
        true: (N,) float64.
        counts: (draws, N) float64, how often each draw has each sample.
    """
    total = counts.sum(1)
    error = predicted - true
    squares = counts @ error**2
    mean = (counts @ true) / total
    # Not the mean of squares minus the square of the mean: far from 0, both are large, and their difference is noise.
    spread = (counts * (true - mean[:, None]) ** 2).sum(1)
    return {
        "mae": (counts @ error.abs()) / total,
        "rmse": (squares / total).sqrt(),
        "r2": torch.where(spread > 0, 1 - squares / spread, torch.nan),
        "spearman": _correlation(_drawn_ranks(predicted, counts), _drawn_ranks(true, counts), counts),
    }


def _drawn_ranks(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the rank of each sample within each draw, (draws, N); equal values have the mean of their ranks."""
    distinct, group = torch.unique(values, return_inverse=True)
    sums = torch.zeros(len(counts), len(distinct), dtype=torch.float64).index_add_(1, group, counts)
    # Up to a constant, which a correlation ignores.
    return (sums.cumsum(1) - sums / 2)[:, group]


def _correlation(a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the correlation (draws,) of two (draws, N), weighted by ``counts``."""
    total = counts.sum(1, keepdim=True)
    a, b = (part - (counts * part).sum(1, keepdim=True) / total for part in (a, b))
    covariance, left, right = ((counts * product).sum(1) for product in (a * b, a**2, b**2))
    return torch.where((left > 0) & (right > 0), covariance / (left * right).sqrt(), torch.nan)
