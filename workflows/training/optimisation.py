"""The optimiser, the learning rate and the loss of a run, from its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from workflows.config.learning import LrScheduleConfig, OptimizerConfig


def make_optimizer(
    config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter], batch: int
) -> torch.optim.Optimizer:
    """Return SGD with momentum or AdamW over ``parameters``; ``batch``: slides of one update, for the learning rate."""
    lr = config.scaled_lr(batch)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, lr=lr, betas=config.betas, weight_decay=config.weight_decay)


def describe_updates(config: OptimizerConfig, batch: int) -> str:
    """Return what one update learns from and how fast, in a line for people; ``batch``: its slides."""
    made = f" ({batch // config.accumulate} × {config.accumulate} accumulated)" if config.accumulate > 1 else ""
    text = f"effective batch {batch}{made}, learning rate {config.scaled_lr(batch):g}"
    if config.lr_scaling == "none":
        return text
    return f"{text}: {config.lr:g} for {config.lr_batch}, scaled {config.lr_scaling}"


def lr_factor(config: LrScheduleConfig, steps: int) -> Callable[[int], float]:
    r"""Return step → factor on the learning rate, of closed form: a run that goes on needs no memory of it.

    ::

        factor 1 |   /‾‾\             cosine, linear: from 1 down to end_factor at the last step
                 |  /    ‾‾\__        step: × gamma every every_steps
               0 | /          ‾‾      constant: 1
                  └─┬───────────┬─ step
                 warmup       steps

    Args:
        config: name, warm-up and its numbers. Step 0 of a warm-up of n steps has the factor 1 / n.
        steps: length of the whole run.
    """
    warmup = config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.name == "step":
            return float(config.gamma ** ((step - warmup) // (config.every_steps or 1)))
        share = min(1.0, (step - warmup) / max(1, steps - warmup))
        if config.name == "cosine":
            return config.end_factor + (1 - config.end_factor) * (1 + math.cos(math.pi * share)) / 2
        if config.name == "linear":
            return 1 - (1 - config.end_factor) * share
        return 1.0

    return factor


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
