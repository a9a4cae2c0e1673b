"""The optimizer and the learning-rate schedule of a run, from its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workflows.config.learning import LrScheduleConfig, OptimizerConfig
from workflows.finetuning.optimizer_class import optimizer_of
from workflows.finetuning.parameter_groups import parameter_groups


def optimizer_factory(
    config: OptimizerConfig, model: torch.nn.Module, batch: int
) -> Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that takes this rank's parameters and returns their optimizer.

    The optimizer has the groups of the whole model, some of them empty on this rank. A parameter without a name in
    ``model`` belongs to the first group.

    Args:
        config: The section ``optimizer``.
        model: The model.
        batch: Slides of one update, for the learning rate.

    Raises:
        RequestError: A group matches no parameter, or the optimizer's class cannot be used.
    """
    make_optimizer, groups = optimizer_of(config), parameter_groups(model, config, batch)
    group_of = {name: index for index, group in enumerate(groups) for name in group.names}

    def make(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters, in the groups of the whole model."""
        # By identity: tensors compare element by element.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        # Empty groups stay: rates and saved states belong to a group by its position, the same on all ranks.
        members: list[list[torch.nn.Parameter]] = [[] for _ in groups]
        for parameter in parameters:
            # A parameter that the model does not name belongs to the first group.
            members[group_of.get(names.get(id(parameter), ""), 0)].append(parameter)
        settings = [
            {"params": params, "lr": group.lr, "weight_decay": group.weight_decay}
            for params, group in zip(members, groups, strict=True)
        ]
        return make_optimizer(settings, config.scaled_lr(batch))

    return make


def describe_updates(config: OptimizerConfig, batch: int) -> str:
    """Return effective batch, learning rates and weight decay as one line of text; ``batch``: slides of one update."""
    parts = f" ({batch // config.accumulate} × {config.accumulate} accumulated)" if config.accumulate > 1 else ""
    text = f"effective batch {batch}{parts}, learning rate {config.scaled_lr(batch):g}"
    if config.lr_scaling != "none":
        text += f": {config.lr:g} for {config.lr_batch}, scaled {config.lr_scaling}"
    if config.weight_decay:
        norms = "of norms and biases, too" if config.decays_norms else "not of norms and biases"
        text += f"; weight decay {config.weight_decay:g}, {norms}"
    if config.layer_decay is not None:
        text += f"; each layer learns {config.layer_decay:g} times as fast as the next"
    for group in config.groups:
        lr = [] if group.lr is None else [f"learning rate {config.scaled_lr(batch, group.lr):g}"]
        decay = [] if group.weight_decay is None else [f"weight decay {group.weight_decay:g}"]
        text += f"; {', '.join(group.match)}: {', '.join(lr + decay)}"
    return text


def lr_factor(config: LrScheduleConfig, steps: int) -> Callable[[int], float]:
    r"""Return a function that takes a step, counted from 0, and returns the factor of its learning rate, without state.

    ::

        factor 1 |   /‾‾\             cosine, linear: from 1 down to end_factor, which step `steps` would have
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
            # + 1: a rate of 0 would waste the first step.
            return (step + 1) / warmup
        if config.name == "step":
            return float(config.gamma ** ((step - warmup) // (config.every_steps or 1)))
        # max: a run may end within its warm-up.
        share = min(1.0, (step - warmup) / max(1, steps - warmup))
        if config.name == "cosine":
            return config.end_factor + (1 - config.end_factor) * (1 + math.cos(math.pi * share)) / 2
        if config.name == "linear":
            return 1 - (1 - config.end_factor) * share
        return 1.0

    return factor


class LearningRate:
    """Sets the learning rate of each step from the schedule alone, so that resuming a run does not change it.

    Args:
        optimizer: The optimizer with the rates after the warm-up, before a saved state is loaded.
        config: The schedule.
        steps: Number of steps of the whole run.
        lr: ``optimizer.lr`` for the run's batch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: LrScheduleConfig, steps: int, lr: float) -> None:
        self._optimizer, self._steps, self._lr = optimizer, steps, lr
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor = lr_factor(config, steps)

    def of(self, step: int) -> list[float]:
        """Return the rate of each parameter group in a step, counted from 1."""
        factor = self._factor(step - 1)
        return [rate * factor for rate in self._rates]

    def set(self, step: int) -> float:
        """Set the rates of a step; return that of ``optimizer.lr``, from which groups of parameters may differ."""
        for group, rate in zip(self._optimizer.param_groups, self.of(step), strict=True):
            group["lr"] = rate
        return self._lr * self._factor(step - 1)

    def describe_change(self, saved: Mapping[str, Any]) -> str | None:
        """Return how a resumed run goes on with another schedule, as one line of text; None if nothing changes.

        Args:
            saved: The ``state.json`` of the checkpoint.
        """
        # Checkpoints of earlier versions hold the state of a scheduler of torch instead.
        saved_rates = saved.get("next_lr") or saved.get("lr_schedule", {}).get("_last_lr")
        step = int(saved["step"]) + 1
        # The first group stands for all. isclose: the factor is computed anew, perhaps by another libm.
        if not saved_rates or step > self._steps or math.isclose(saved_rates[0], self.of(step)[0], rel_tol=1e-9):
            return None
        was = f" of {saved['steps']} steps" if "steps" in saved else " as it was"
        return (
            f"the learning rate follows the schedule of {self._steps} steps from now on: step {step} has "
            f"{self.of(step)[0]:.6g}, as in a run of this length from its start; the schedule{was} had "
            f"{saved_rates[0]:.6g}"
        )
