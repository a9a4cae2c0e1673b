"""From predictions of slides to predictions of cases: a patient may have several slides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Aggregate = Literal["mean", "max", "none"]


@dataclass(frozen=True, eq=False)
class Cases:
    """M cases, in the order of their first slides.

    Attributes:
        of_slide: (N,) the case of each slide.
        logits: (M, K) float64, log-probabilities.
        targets: (M,) classes.
    """

    of_slide: torch.Tensor
    logits: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        """Return the number of cases."""
        return len(self.targets)


def places_of(cases: Sequence[str]) -> torch.Tensor:
    """Return the number of each slide's case, (N,); cases are numbered as they first appear."""
    numbers = {case: number for number, case in enumerate(dict.fromkeys(cases))}
    return torch.tensor([numbers[case] for case in cases], dtype=torch.long)


def by_case(logits: torch.Tensor, targets: torch.Tensor, cases: Sequence[str], how: Literal["mean", "max"]) -> Cases:
    """Return the cases of N slides.

    ``mean``: the mean of the slides' probabilities. ``max``: the most advanced slide speaks for its case: that with the
    largest expected class index Σ k · p_k, which for two classes is the highest probability of class 1; the first of
    equals. A case's class is the highest of its slides'.

    Args:
        logits: (N, K), of the slides.
        targets: (N,) their classes.
        cases: (N,) names.
        how: ``mean`` or ``max``.
    """
    log_p = logits.double().log_softmax(1)
    of_slide = places_of(cases)
    expected = log_p.exp() @ torch.arange(log_p.shape[1], dtype=torch.float64)
    rows, classes = [], []
    for case in range(int(of_slide.max()) + 1 if len(of_slide) else 0):
        mine = (of_slide == case).nonzero()[:, 0]
        if how == "mean":
            rows.append(log_p[mine].logsumexp(0) - torch.tensor(len(mine), dtype=torch.float64).log())
        else:
            rows.append(log_p[mine[expected[mine].argmax()]])
        classes.append(int(targets[mine].max()))
    return Cases(of_slide, torch.stack(rows) if rows else log_p, torch.tensor(classes, dtype=torch.long))
