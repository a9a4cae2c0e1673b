"""Conditional probabilities of rising grades: CORN (Shi, Cao and Raschka, arXiv:2111.08851).

::

    grades     0 ──── 1 ──── 2 ──── 3          K grades, K − 1 outputs
    output k      o₀     o₁     o₂             sigmoid(oₖ) = P(grade > k, if it is not below k)

P(grade > k) is the product of the sigmoids up to k, so it never rises with k, whatever the outputs.
"""

from __future__ import annotations

import torch

from workflows.tasks.class_metrics import confusion_of, mean_present, quadratic_kappa


def above(outputs: torch.Tensor) -> torch.Tensor:
    """Return log P(grade > k), (…, K − 1), of outputs (…, K − 1)."""
    return torch.nn.functional.logsigmoid(outputs).cumsum(-1)


def outputs_of(log_above: torch.Tensor) -> torch.Tensor:
    """Return the outputs for which `above` returns ``log_above``."""
    before = torch.nn.functional.pad(log_above[..., :-1], (1, 0))
    conditional = (log_above - before).clamp(max=-1e-15)  # at 0, the output would be infinite
    # The inverse of logsigmoid: log p − log(1 − p).
    return conditional - torch.log(-torch.expm1(conditional))


def corn_losses(outputs: torch.Tensor, grades: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each sample's grade, (N,): output k counts if the grade is not below k."""
    at = torch.arange(outputs.shape[1], device=outputs.device)
    counted, higher = grades[:, None] >= at, (grades[:, None] > at).to(outputs.dtype)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(outputs, higher, reduction="none")
    return (losses * counted).sum(1)


def predicted_grades(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the median grade (N,) of probabilities (N, K): the lowest with P(higher grade) of at most one half."""
    return (1 - probabilities.cumsum(1)[:, :-1] > 0.5).sum(1)


def grade_metrics(
    predicted: torch.Tensor, grades: torch.Tensor, grade_count: int, counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the metrics of each bootstrap draw, (draws,) each; NaN if undefined.

    ``quadratic_kappa``: agreement beyond chance, an error by d grades counts d². ``mae``: mean absolute error in
    grades. ``accuracy``, ``balanced_accuracy``.

    Args:
        predicted: (N,) grades.
        grades: (N,) true ones.
        grade_count: Number of grades.
        counts: (draws, N) float64, how often each draw has each sample.
    """
    confusion = confusion_of(predicted, grades, grade_count, counts)
    # (draws, grades): samples of each grade, and those of them that are predicted right.
    true, hit = confusion.sum(2), confusion.diagonal(dim1=1, dim2=2)
    several_grades = (true > 0).sum(1) > 1
    total = counts.sum(1)
    return {
        "quadratic_kappa": torch.where(several_grades, quadratic_kappa(confusion), torch.nan),
        "mae": counts @ (predicted - grades).abs().double() / total,
        "balanced_accuracy": torch.where(several_grades, mean_present(hit / true, true), torch.nan),
        "accuracy": hit.sum(1) / total,
    }
