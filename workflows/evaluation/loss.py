"""The loss of a run, the same in training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def sample_losses(logits: torch.Tensor, labels: torch.Tensor, class_weights: Sequence[float]) -> torch.Tensor:
    """Return w_y · ℓ of each sample ``(N,)``: cross-entropy times the weight of the sample's class."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = torch.tensor(class_weights, dtype=wide.dtype, device=wide.device)
    return torch.nn.functional.cross_entropy(wide, labels, weight=weights, reduction="none")


def make_loss(class_weights: Sequence[float], accumulate: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of a micro-batch: the mean of w_y · ℓ over its samples, divided by ``accumulate``.

    All micro-batches have the same size, so the mean of their losses is Σ w_y · ℓ / B over the whole batch, however it
    is divided. torch's weighted mean divides by Σ w_y instead, which depends on the division into micro-batches.
    """

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return sample_losses(logits, labels, class_weights).mean() / accumulate

    return loss
