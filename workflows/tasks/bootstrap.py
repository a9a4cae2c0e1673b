"""Confidence intervals of metrics by bootstrap over cases, computed for all draws at once.

A draw of M cases from M with replacement is a row of counts. Every metric is a function of sums over samples, so all
draws take a few matrix products. Tests compare the result with torchmetrics on the drawn samples. Percentile intervals:
Efron and Tibshirani, An Introduction to the Bootstrap, 1993.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import torch

from workflows.tasks.area_interval import area_interval
from workflows.tasks.class_metrics import METRICS, log_odds, metrics_of_logits, weighted_metrics

DRAWS, SEED = 1000, 20_000
LEVEL = 0.95
FEW = 100
"""Up to this many slides, intervals of an accuracy and an AUROC follow formulas; with more, the bootstrap holds."""
MAX_COUNTS = 4_000_000
"""Most counts processed at once: 32 MB for each of a few temporary arrays."""

Intervals = dict[str, list[float] | None]
Draw = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""Returns the metrics of some rows of counts (draws, N), each (draws,); NaN if undefined."""


def draw_cases(cases: int, draws: int = DRAWS, seed: int = SEED) -> torch.Tensor:
    """Return (draws, cases) float64: how often each case is in each draw; depends only on the arguments."""
    # Drawing M of M with replacement, in any order: only how often each case comes matters.
    counts = np.random.default_rng(seed).multinomial(cases, np.full(cases, 1 / cases), size=draws)
    return torch.from_numpy(counts.astype(np.float64))


def intervals(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor) -> Intervals:
    """Return {metric: [low, high]}: the middle 95 % of the draws in which the metric is defined.

    The interval is None if fewer than half of the draws define the metric, if there is only one case, or if logits are
    not finite. With few slides, intervals of an AUROC and an accuracy follow formulas: `rank_interval`,
    `share_interval`.

    Args:
        logits: (N, K).
        targets: (N,) class indices.
        losses: (N,) loss of each sample, weighted as in training; ``loss`` is their mean.
        counts: (draws, N) how often each sample is in each draw; equal for samples of the same case.
    """
    names = ("loss", *METRICS)
    # Not only NaN: an infinite logit has a probability, but no loss.
    if len(targets) == 0 or not bool(logits.isfinite().all()):
        return dict.fromkeys(names)
    intervals_of = resampled(lambda block: drawn_metrics(logits, targets, losses, block), names, counts)
    if logits.shape[1] == 2 and (area := metrics_of_logits(logits, targets)["auroc"]) is not None:
        intervals_of = rank_interval(intervals_of, area, targets == 1, counts)
    return share_interval(intervals_of, float((logits.argmax(1) == targets).double().mean()), counts)


def rank_interval(intervals: Intervals, area: float, positive: torch.Tensor, counts: torch.Tensor) -> Intervals:
    """Return intervals; with up to `FEW` slides and two cases or more, that of ``auroc`` becomes its `area_interval`.

    Args:
        intervals: By metric.
        area: The AUROC of all slides.
        positive: (N,) bool, whether each slide has the class.
        counts: (draws, N) how often each draw has each slide; slides with equal counts are one case.
    """
    if counts.shape[1] > FEW or _cases(counts) < 2:
        return intervals
    return {**intervals, "auroc": area_interval(area, _cases(counts[:, positive]), _cases(counts[:, ~positive]), LEVEL)}


def share_interval(intervals: Intervals, accuracy: float, counts: torch.Tensor) -> Intervals:
    """Return intervals; with up to `FEW` slides and two cases or more, that of ``accuracy`` becomes Wilson's.

    Args:
        intervals: By metric.
        accuracy: That of all slides.
        counts: (draws, N) how often each draw has each slide; slides with equal counts are one case.
    """
    cases = _cases(counts) if counts.shape[1] <= FEW else 0
    return {**intervals, "accuracy": wilson(accuracy, cases)} if cases > 1 else intervals


def _cases(counts: torch.Tensor) -> int:
    """Return the number of cases: slides of one case have the same counts, because each draw has them equally often."""
    return len({tuple(column) for column in counts.T.tolist()})


def wilson(share: float, cases: int) -> list[float]:
    """Return the 95 % interval of a share of ``cases``, which also holds if all or none are counted.

    Wilson, Probable inference, the law of succession, and statistical inference, JASA 22:209, 1927. Slides of one case
    are not independent, so the number of cases counts, not the number of slides: the interval is then wide enough.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle, factor = share + z**2 / (2 * cases), 1 + z**2 / cases
    half = z * math.sqrt(share * (1 - share) / cases + z**2 / (4 * cases**2))
    # The bounds are within 0 and 1 but for rounding.
    return [max(0.0, (middle - half) / factor), min(1.0, (middle + half) / factor)]


def measured(draw: Draw, samples: int) -> dict[str, float | None]:
    """Return the metrics of the samples themselves, as one draw that has each once; None if undefined."""
    values = {name: float(value) for name, value in draw(torch.ones(1, samples, dtype=torch.float64)).items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def resampled(draw: Draw, names: Sequence[str], counts: torch.Tensor) -> Intervals:
    """Return {metric: [low, high]}: the middle 95 % of the draws in which the metric is defined.

    The interval is None if fewer than half of the draws define the metric, if it is the same in all, as where three
    cases are ranked without an error, or if there is only one case.

    Args:
        draw: Takes some rows of ``counts``; returns the metrics of these draws.
        names: The metrics.
        counts: (draws, N) how often each sample is in each draw; equal for samples of the same case.
    """
    # One case, which every draw has once: draws say nothing about others.
    if bool((counts == 1).all()):
        return dict.fromkeys(names)
    # Draws in blocks: all at once, temporary arrays of many slides would not fit.
    blocks = [draw(block) for block in counts.split(max(1, MAX_COUNTS // counts.shape[1]))]
    values = {name: torch.cat([block[name] for block in blocks]).numpy() for name in names}
    return {name: _interval(value) for name, value in values.items()}


def drawn_metrics(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the metrics of every draw, each (draws,); NaN if undefined. See :func:`intervals`."""
    logits, losses = logits.double(), losses.double()
    metrics = weighted_metrics(log_odds(logits), logits, logits.softmax(1), targets, counts)
    return metrics | {"loss": (counts * losses).sum(1) / counts.sum(1)}


def _interval(values: np.ndarray) -> list[float] | None:
    """Return the interval that contains `LEVEL` of the draws; None if it would mean nothing."""
    # NaN: the draw lacks a class. The other draws count, unless they are the minority.
    defined = values[np.isfinite(values)]
    if 2 * len(defined) < len(values) or not len(defined):
        return None
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(defined, [outside, 1 - outside])
    if low == high:
        return None  # all draws agree because the samples are few, not because the metric is certain
    return [float(low), float(high)]
