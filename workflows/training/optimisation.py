"""The optimizer and the learning-rate schedule of a run, from its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

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
    """Return the effective batch and the learning rate as one line of text; ``batch``: slides of one update."""
    parts = f" ({batch // config.accumulate} × {config.accumulate} accumulated)" if config.accumulate > 1 else ""
    text = f"effective batch {batch}{parts}, learning rate {config.scaled_lr(batch):g}"
    if config.lr_scaling == "none":
        return text
    return f"{text}: {config.lr:g} for {config.lr_batch}, scaled {config.lr_scaling}"


def lr_factor(config: LrScheduleConfig, steps: int) -> Callable[[int], float]:
    r"""Return the function from a step to the factor of the learning rate; it has no state to save.

    ::

        factor 1 |   /‾‾\             cosine, linear: from 1 down to end_factor at the last step
                 |  /    ‾‾\__        step: × gamma every every_steps
               0 | /          ‾‾      constant: 1
                  └─┬───────────┬─ step
                 warmup       steps

    Args:
        config: The schedule. Step 0 of a warm-up of n steps has the factor 1 / n.
        steps: Number of steps of the whole run.
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
