"""Aggregation of predictions of slides to predictions of cases, which may have several slides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

CasePooling = Literal["mean", "max", "logits"]
"""How the predictions of a case's slides become one."""
Aggregate = Literal["mean", "max", "logits", "none"]


@dataclass(frozen=True, eq=False)
class Cases:
    """M cases, in the order of their first slides.

    Attributes:
        of_slide: (N,) index of each slide's case.
        logits: (M, K) float64 log-probabilities.
        targets: (M,) class indices.
    """

    of_slide: torch.Tensor
    logits: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        """Return the number of cases."""
        return len(self.targets)


def case_indices(cases: Sequence[str]) -> torch.Tensor:
    """Return the index of each slide's case, (N,); cases are numbered in the order of their first slides."""
    numbers = {case: number for number, case in enumerate(dict.fromkeys(cases))}
    return torch.tensor([numbers[case] for case in cases], dtype=torch.long)


def members_of(of_slide: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices of each case's slides, ascending.

    Args:
        of_slide: (N,) index of each slide's case; cases are numbered from 0 without gaps.
    """
    return list(of_slide.argsort(stable=True).split(of_slide.bincount().tolist())) if len(of_slide) else []


def by_case(logits: torch.Tensor, targets: torch.Tensor, cases: Sequence[str], how: CasePooling) -> Cases:
    """Aggregate the predictions of N slides by case.

    ``mean`` averages the probabilities of a case's slides, ``logits`` their logits. ``max`` takes the prediction of the
    slide with the largest expected class index Σ k · p_k (for two classes: the highest probability of class 1), the
    first of equals. The target of a case is the highest class index of its slides.

    Args:
        logits: (N, K) of the slides.
        targets: (N,) class indices of the slides.
        cases: (N,) names of their cases.
        how: ``mean``, ``max`` or ``logits``.
    """
    return aggregated(logits, targets, case_indices(cases), how)


def aggregated(logits: torch.Tensor, targets: torch.Tensor, of_slide: torch.Tensor, how: CasePooling) -> Cases:
    """Aggregate predictions like `by_case`, given the index of each slide's case, ``of_slide``: (N,)."""
    log_p = logits.double().log_softmax(1)
    # Of each slide, (N,): the expected class index, by which `max` chooses.
    expected = log_p.exp() @ torch.arange(log_p.shape[1], dtype=torch.float64)
    rows, classes = [], []
    for members in members_of(of_slide):
        if how == "mean":
            # log of the mean probability, without leaving logs: a tiny p would become 0, and its log −inf.
            rows.append(log_p[members].logsumexp(0) - torch.tensor(len(members), dtype=torch.float64).log())
        elif how == "logits":
            rows.append(logits[members].double().mean(0).log_softmax(0))
        else:
            # argmax takes the first of equals, so the result does not depend on the number of threads.
            rows.append(log_p[members[expected[members].argmax()]])
        classes.append(int(targets[members].max()))
    return Cases(of_slide, torch.stack(rows) if rows else log_p, torch.tensor(classes, dtype=torch.long))
