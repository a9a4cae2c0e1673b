"""The loss of a run: the same in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def sample_losses(logits: torch.Tensor, labels: torch.Tensor, class_weights: Sequence[float]) -> torch.Tensor:
    """Return w_y · ℓ of each sample, ``(N,)``: cross-entropy times the weight of the sample's class."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = torch.tensor(class_weights, dtype=wide.dtype, device=wide.device)
    return torch.nn.functional.cross_entropy(wide, labels, weight=weights, reduction="none")


def make_loss(class_weights: Sequence[float], accumulate: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of a micro-batch: the mean of w_y · ℓ over its samples, over the ``accumulate`` calls of a step.

    Micro-batches are equal, so their mean is Σ w_y · ℓ / B over the whole batch, whatever they are; torch's own
    weighted mean divides by Σ w_y instead, which depends on how samples fall into micro-batches.
    """

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return sample_losses(logits, labels, class_weights).mean() / accumulate

    return loss
