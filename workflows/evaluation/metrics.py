"""Classification metrics, by torchmetrics; None if undefined.

All metrics are undefined (None, never 0) without samples or if outputs are not finite. If all targets are of one class,
only accuracy and calibration error are defined.
"""

from __future__ import annotations

import math

import torch

METRICS = ("auroc", "balanced_accuracy", "accuracy", "f1", "quadratic_kappa", "calibration_error")
LOWER_IS_BETTER = ("loss", "calibration_error")
CALIBRATION_BINS = 15
Metrics = dict[str, float | None]


def metrics_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> Metrics:
    """Return the metrics of unnormalised outputs.

    Samples are ranked by the log-odds of each class in float64, because different logits may have the same probability
    near 1.

    Args:
        logits: (N, K), K ≥ 2.
        targets: (N,) class indices, all labelled.

    Returns:
        ``auroc`` (of class 1 against class 0; with more classes the mean, over the classes present, of each against the
        rest), ``balanced_accuracy`` (mean recall of the classes present), ``accuracy``, ``f1`` (of class 1; with more
        classes the mean over the classes present), ``quadratic_kappa`` (Cohen's kappa in which an error by d classes
        counts d², for ordered classes), ``calibration_error`` (expected calibration error, over 15 equal bins of the
        highest probability).

    Raises:
        ValueError: The shapes do not match, or a target is not a class index.
    """
    logits = logits.detach().cpu().double()
    _check(logits, targets)
    return _metrics(log_odds(logits), logits, logits.softmax(1), targets.detach().cpu().long())


def metrics_of_probabilities(probabilities: torch.Tensor, targets: torch.Tensor) -> Metrics:
    """Return the metrics of probabilities (N, K); see :func:`metrics_of_logits`."""
    probabilities = probabilities.detach().cpu().double()
    _check(probabilities, targets)
    return _metrics(probabilities, probabilities, probabilities, targets.detach().cpu().long())


def log_odds(logits: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 − p)) of each class, (N, K), without computing p, which could round to 1."""
    others = logits.unsqueeze(1).expand(-1, logits.shape[1], -1).clone()
    others.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    return logits - others.logsumexp(dim=2)


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """Return the rank of each score (N,) among the distinct scores, from 0; equal scores have equal ranks."""
    found: torch.Tensor = scores.unique(return_inverse=True)[1]
    return found


def _check(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    if outputs.ndim != 2 or outputs.shape[1] < 2 or targets.shape != outputs.shape[:1]:
        raise ValueError(f"expected outputs (N, K ≥ 2) and targets (N,), given {outputs.shape} and {targets.shape}")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
        raise ValueError(f"targets must be in 0 … {outputs.shape[1] - 1}, given {targets.min()} … {targets.max()}")


def _metrics(
    scores: torch.Tensor, outputs: torch.Tensor, probabilities: torch.Tensor, targets: torch.Tensor
) -> Metrics:
    from torchmetrics.functional.classification import (
        multiclass_calibration_error,
        multiclass_cohen_kappa,
        multiclass_f1_score,
        multiclass_recall,
    )

    if not len(targets) or not bool(outputs.isfinite().all()):
        return dict.fromkeys(METRICS)
    predicted, classes = outputs.argmax(dim=1), outputs.shape[1]
    accuracy = float((predicted == targets).double().mean())
    calibration = float(multiclass_calibration_error(probabilities, targets, classes, n_bins=CALIBRATION_BINS))
    present = targets.unique()
    if len(present) == 1:
        return dict.fromkeys(METRICS) | {"accuracy": accuracy, "calibration_error": calibration}
    recall = multiclass_recall(predicted, targets, classes, average=None)
    f1 = multiclass_f1_score(predicted, targets, classes, average=None)
    kappa = float(multiclass_cohen_kappa(predicted, targets, classes, weights="quadratic"))
    return {
        "auroc": _auroc(scores, targets, present),
        "balanced_accuracy": float(recall[present].mean()),
        "accuracy": accuracy,
        "f1": float(f1[1] if classes == 2 else f1[present].mean()),
        "quadratic_kappa": kappa if math.isfinite(kappa) else None,
        "calibration_error": calibration,
    }


def _auroc(scores: torch.Tensor, targets: torch.Tensor, present: torch.Tensor) -> float:
    from torchmetrics.functional.classification import binary_auroc

    positive = [1] if scores.shape[1] == 2 else present.tolist()
    areas = [binary_auroc(_unit_ranks(scores[:, c]), (targets == c).long()) for c in positive]
    return float(torch.stack(areas).double().mean())


def _unit_ranks(scores: torch.Tensor) -> torch.Tensor:
    """Return the scores' ranks scaled to [0, 1]; to values outside, torchmetrics applies a sigmoid, which may tie."""
    rank = ranks(scores).double()
    return rank / max(1.0, float(rank.max()))
