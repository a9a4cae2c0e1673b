"""The optimizer of ``optimizer.name``: one of PyTorch, one of this package, or a class of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hyfi_core.errors import RequestError
from hyfi_core.user_code import load_user_code
from workflows.config.learning import OptimizerConfig
from workflows.finetuning.optimizers.lamb import Lamb
from workflows.finetuning.optimizers.lion import Lion
from workflows.finetuning.optimizers.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD
from workflows.finetuning.optimizers.switching import SwitchingOptimizer

GroupSettings = list[dict[str, Any]]
_NAMED: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "lion": Lion,
    "schedulefree": ScheduleFreeAdamW,
    "schedulefree_sgd": ScheduleFreeSGD,
}


def optimizer_of(config: OptimizerConfig) -> Callable[[GroupSettings, float], torch.optim.Optimizer]:
    """Return a function from (parameter groups, learning rate) to the optimizer.

    Raises:
        RequestError: There is no such class, or it does not take ``optimizer.options``.
    """
    for name in ("params", "lr", "weight_decay"):
        if name in config.options:
            raise RequestError(
                f"optimizer.options.{name}: use optimizer.lr, optimizer.weight_decay or optimizer.groups"
            )
    kind = _NAMED.get(config.name) or _imported(config.name)
    accepted = inspect.signature(kind).parameters
    arguments = dict(_arguments(config))
    # A class with **kwargs may take anything: it refuses itself.
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        unknown = sorted(set(config.options) - set(accepted))
        if unknown:
            names = ", ".join(name for name in accepted if name not in ("params", "lr"))
            raise RequestError(f"optimizer.options.{unknown[0]}: {config.name} does not take it; it takes {names}")
        if "weight_decay" not in accepted:
            _refuse_decay(config)

    def make(groups: GroupSettings, lr: float) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters; refuse what is none, or what the options do not fit."""
        try:
            optimizer = kind(groups, lr=lr, **arguments)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"optimizer.name {config.name}: cannot be made from options {arguments}: {error}"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RequestError(
                f"optimizer.name {config.name}: it returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
            )
        if isinstance(optimizer, SwitchingOptimizer):
            optimizer.train()  # some begin in evaluation mode
        return optimizer

    return make


def _arguments(config: OptimizerConfig) -> Mapping[str, Any]:
    """Return the arguments of the class besides parameters and learning rate; ``options`` come last."""
    own: dict[str, Any] = {}
    if config.name in ("sgd", "schedulefree_sgd"):
        own = {"momentum": config.momentum}
    elif config.name in _NAMED:
        own = {"betas": config.betas}
    return own | config.options


def _refuse_decay(config: OptimizerConfig) -> None:
    """Refuse weight decay, for an optimizer that has none."""
    if config.weight_decay or any(group.weight_decay for group in config.groups):
        raise RequestError(f"optimizer.weight_decay: {config.name} has no weight decay; set it to 0")


def _imported(name: str) -> Callable[..., Any]:
    kind: Callable[..., Any] = load_user_code("optimizer.name", name, "an optimizer's class")
    return kind
