"""The section of a cohort page for grades: confusion, curves of each step, metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workflows.tasks.bootstrap import measured, resampled, share_interval
from workflows.tasks.curves import Array
from workflows.tasks.ordinal.corn import grade_metrics, predicted_grades
from workflows.tasks.page_section import PageSection, PageTable, metric_numbers, shown_metric
from workflows.tasks.plots import ScoredClass, confusion_plot, rate_plots


def grades_section(values: Array, grades: torch.Tensor, draws: Array, names: Sequence[str]) -> PageSection:
    """Return plots and tables of N labelled slides.

    Args:
        values: (N, grades) probabilities.
        grades: (N,) true ones.
        draws: (draws, N) how often each bootstrap draw has each slide.
        names: The grades.
    """
    probabilities, counts = torch.from_numpy(np.ascontiguousarray(values)), torch.from_numpy(draws)
    predicted, grade_count = predicted_grades(probabilities), len(names)

    def metrics_of_draws(block: torch.Tensor) -> dict[str, torch.Tensor]:
        return grade_metrics(predicted, grades, grade_count, block)

    # Of the slides, each once; the draws give their intervals.
    once = measured(metrics_of_draws, len(grades))
    right = float((predicted == grades).double().mean())
    bounds = share_interval(resampled(metrics_of_draws, list(once), counts), right, counts)
    shown = [
        shown_metric("mean error in grades" if name == "mae" else name, value, bounds[name])
        for name, value in once.items()
    ]
    true, higher = grades.numpy(), 1 - probabilities.cumsum(1)
    steps = range(grade_count - 1)
    curves = [ScoredClass(f"above {names[k]}", k, higher[:, k].numpy(), true > k, draws) for k in steps]
    # The error of a slide, by which the page orders wrong ones: by how many grades the prediction is off, plus a part
    # below 1 that orders slides with the same number: their ranked probability score, which is below ``grade_count``.
    off = (predicted - grades).abs()
    score = (probabilities.cumsum(1) - (torch.arange(grade_count) >= grades[:, None]).double()).square().sum(1)
    wrong = off.nonzero()[:, 0].tolist()
    return PageSection(
        shown,
        [*rate_plots(curves), confusion_plot(predicted.numpy(), true, names)],
        [_table(predicted, grades, names)],
        {k: float(off[k] + score[k] / grade_count) for k in wrong},
        metric_numbers(once, bounds),
    )


def _table(predicted: torch.Tensor, grades: torch.Tensor, names: Sequence[str]) -> PageTable:
    """Return a table of how far the predictions for slides of each grade are off."""
    rows = []
    for k, name in enumerate(names):
        off = (predicted - grades)[grades == k].abs()
        shares = [f"{float((off <= most).double().mean()):.3f}" if len(off) else "–" for most in (0, 1)]
        rows.append((name, f"{len(off)}", *shares, f"{float(off.double().mean()):.3f}" if len(off) else "–"))
    return PageTable("Grades", ("grade", "slides", "right", "off by at most one", "mean error"), tuple(rows))
