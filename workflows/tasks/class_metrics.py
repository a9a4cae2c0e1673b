"""Classification metrics; None if undefined.

All metrics are undefined (None, never 0) without samples or if outputs are not finite. If all targets are of one class,
only accuracy and calibration error are defined.

Every metric is a function of sums over samples, so that the metrics of many draws take a few matrix products
(:mod:`workflows.tasks.bootstrap`). Tests compare them with torchmetrics. It is not used here because importing it also
imports installed packages for text and audio, which takes seconds in every process that validates.
"""

from __future__ import annotations

import math

import torch

METRICS = ("auroc", "balanced_accuracy", "accuracy", "f1", "quadratic_kappa", "calibration_error")
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
    other_classes = logits.unsqueeze(1).expand(-1, logits.shape[1], -1).clone()
    # −inf leaves a class out of its own sum.
    other_classes.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    return logits - other_classes.logsumexp(dim=2)


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """Return the rank of each score (N,) among the distinct scores, from 0; equal scores have equal ranks."""
    indices: torch.Tensor = scores.unique(return_inverse=True)[1]
    return indices


def _check(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    if outputs.ndim != 2 or outputs.shape[1] < 2 or targets.shape != outputs.shape[:1]:
        raise ValueError(f"expected outputs (N, K ≥ 2) and targets (N,), given {outputs.shape} and {targets.shape}")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[1]:
        raise ValueError(f"targets must be in 0 … {outputs.shape[1] - 1}, given {targets.min()} … {targets.max()}")


def _metrics(
    scores: torch.Tensor, outputs: torch.Tensor, probabilities: torch.Tensor, targets: torch.Tensor
) -> Metrics:
    """Return the metrics of all samples, each once; None if undefined.

    Args:
        scores: (N, K) by which each class ranks the samples.
        outputs: (N, K); the predicted class is that of the largest.
        probabilities: (N, K).
        targets: (N,) class indices.
    """
    if not len(targets) or not bool(outputs.isfinite().all()):
        return dict.fromkeys(METRICS)
    once = torch.ones(1, len(targets), dtype=torch.float64)
    drawn = weighted_metrics(scores, outputs, probabilities, targets, once)
    values = {name: float(drawn[name]) for name in METRICS}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def weighted_metrics(
    scores: torch.Tensor,
    outputs: torch.Tensor,
    probabilities: torch.Tensor,
    targets: torch.Tensor,
    counts: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the metrics of each bootstrap draw, (draws,) each; NaN if undefined.

    Args:
        scores: (N, K) by which each class ranks the samples.
        outputs: (N, K); the predicted class is that of the largest.
        probabilities: (N, K).
        targets: (N,) class indices.
        counts: (draws, N) float64, how often each draw has each sample.
    """
    classes = outputs.shape[1]
    predicted = outputs.argmax(1)
    confusion = confusion_of(predicted, targets, classes, counts)
    # (draws, classes): samples of each class, samples predicted as it, and both.
    true, predicted_as, hit = confusion.sum(2), confusion.sum(1), confusion.diagonal(dim1=1, dim2=2)
    several_classes = (true > 0).sum(1) > 1
    # 0 / 0 gives NaN where a class is absent: `mean_present` leaves it out, and torch.where below what is undefined.
    f1 = 2 * hit / (true + predicted_as)
    metrics = {
        "auroc": _areas(scores, targets, counts, true),
        "balanced_accuracy": mean_present(hit / true, true),
        "f1": f1[:, 1] if classes == 2 else mean_present(f1, true),
        "quadratic_kappa": quadratic_kappa(confusion),
    }
    metrics = {name: torch.where(several_classes, value, torch.nan) for name, value in metrics.items()}
    return metrics | {
        "accuracy": hit.sum(1) / counts.sum(1),
        "calibration_error": _calibration(probabilities, predicted == targets, counts),
    }


def confusion_of(predicted: torch.Tensor, targets: torch.Tensor, classes: int, counts: torch.Tensor) -> torch.Tensor:
    """Return the confusion matrix of each draw, (draws, true class, predicted class)."""
    return _summed(counts, targets * classes + predicted, classes**2).view(-1, classes, classes)


def _summed(counts: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """Return (draws, groups): the sum of ``counts`` (draws, N) over the samples of each group; ``group``: (N,)."""
    # float64: sums of counts stay exact.
    return torch.zeros(len(counts), groups, dtype=torch.float64).index_add_(1, group, counts)


def mean_present(values: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the mean of (draws, classes) over the classes that are present in a draw."""
    present = true > 0
    return torch.where(present, values, 0.0).sum(1) / present.sum(1)


def _areas(scores: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Return the area under the ROC curve (draws,): the fraction of pairs (positive, negative) in right order.

    Ties count one half. With more than two classes, the mean over the classes present. ``true``: (draws, classes)
    samples of each class.
    """
    classes = scores.shape[1]
    areas = []
    for c in [1] if classes == 2 else range(classes):
        rank = ranks(scores[:, c])
        positive = _summed(counts * (targets == c), rank, int(rank.max()) + 1)
        negative = _summed(counts * (targets != c), rank, int(rank.max()) + 1)
        # Negatives below each score; of those with the same score, one half.
        below = negative.cumsum(1) - negative / 2
        areas.append((positive * below).sum(1) / (positive.sum(1) * negative.sum(1)))
    return areas[0] if classes == 2 else mean_present(torch.stack(areas, 1), true)


def quadratic_kappa(confusion: torch.Tensor) -> torch.Tensor:
    """Return Cohen's kappa with quadratic weights (draws,) of confusion matrices (draws, K, K)."""
    grade = torch.arange(confusion.shape[1], dtype=torch.float64)
    weights = (grade[:, None] - grade) ** 2
    expected = confusion.sum(2)[:, :, None] * confusion.sum(1)[:, None, :]
    by_chance = (weights * expected).sum((1, 2)) / confusion.sum((1, 2))
    return 1 - (weights * confusion).sum((1, 2)) / by_chance


def _calibration(probabilities: torch.Tensor, right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the expected calibration error (draws,): |accuracy − confidence| of bins, weighted by their samples."""
    confidence = probabilities.amax(1)
    # In float32 like torchmetrics, so that a confidence on the edge of a bin falls into the same one.
    of_bin = torch.bucketize(confidence.float(), torch.linspace(0, 1, CALIBRATION_BINS + 1), right=True) - 1
    # One more bin than there are: a confidence of exactly 1 has one of its own.
    difference = _summed(counts * (right.double() - confidence), of_bin, CALIBRATION_BINS + 1)
    return difference.abs().sum(1) / counts.sum(1)
