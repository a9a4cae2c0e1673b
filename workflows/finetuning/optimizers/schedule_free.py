"""Schedule-free AdamW and SGD: they average the weights instead of lowering the learning rate.

::

    z   the weights of the base optimizer          x   their average, which is evaluated, saved as best, exported
    y = (1 − β₁) z + β₁ x                          where gradients are computed: the model's parameters in training

    z ← z − lr (d + λ y)        d = g, or g / (√v̂ + ε) with v ← β₂ v + (1 − β₂) g²
    x ← (1 − c) x + c z         c = lr² / Σ lr², over the steps of this parameter

x is not stored, as it follows from y and z; so AdamW needs no more memory than without averaging. Steps are counted
for each parameter, so that a parameter that is trained from a later epoch on has its own bias correction and average.
The ``schedulefree`` package counts steps for a group.
Source: Defazio et al., The Road Less Scheduled, NeurIPS 2024 (arXiv 2405.15682), Algorithm 1 and its AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class ScheduleFree(torch.optim.Optimizer):
    """Base class of schedule-free optimizers; the parameters are y, until ``eval`` turns them into x.

    Calls of ``eval`` and ``train`` alternate: a second one in a row would move the weights once more.

    Args:
        params: Parameters or groups of them.
        defaults: Settings of groups: lr, beta (β₁), weight_decay.

    Raises:
        ValueError: β₁ is 0 or 1: then y does not determine x.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            if not 0 < group["beta"] < 1:
                raise ValueError(f"its first beta (or momentum) is {group['beta']}; use a number between 0 and 1")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights that have gradients; in training mode only, where parameters are y = (1 − β) z + β x."""
        for group in self.param_groups:
            lr, beta = group["lr"], group["beta"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if not state:
                    # At first x, y and z are equal.
                    state |= {"step": 0, "weight_sum": 0.0, "z": y.clone()}
                state["step"] += 1
                state["weight_sum"] += lr**2
                # Share of this step in the average x; a rate of 0 in the first steps leaves x as it is.
                share = lr**2 / state["weight_sum"] if state["weight_sum"] else 0.0
                update = self._direction(state, group, y.grad).add(y, alpha=group["weight_decay"])
                # With z' = z − lr · update, the new y is (1 − β) z' + β ((1 − share) x + share · z'). The old
                # y = (1 − β) z + β x gives the same without x.
                y.lerp_(state["z"], share).sub_(update, alpha=lr * (1 - beta * (1 - share)))
                state["z"].sub_(update, alpha=lr)

    def _direction(self, state: dict[str, Any], group: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """Return d of a parameter; the caller does not change it."""
        return gradient

    @torch.no_grad()
    def eval(self) -> None:
        """Make the parameters the averages x, in place, up to rounding."""
        for group in self.param_groups:
            for weight in group["params"]:
                if "z" in self.state.get(weight, ()):
                    # x = (y − (1 − β) z) / β, which is y moved away from z.
                    weight.lerp_(self.state[weight]["z"], 1 - 1 / group["beta"])

    @torch.no_grad()
    def train(self) -> None:
        """Make the averages the parameters y again, in place, up to rounding."""
        for group in self.param_groups:
            for weight in group["params"]:
                if "z" in self.state.get(weight, ()):
                    # y = (1 − β) z + β x.
                    weight.lerp_(self.state[weight]["z"], 1 - group["beta"])


class ScheduleFreeAdamW(ScheduleFree):
    """Schedule-free AdamW.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: β₁, the share of the average in y, and β₂, the decay of the average of squared gradients.
        eps: Added to the root of the average square.
        weight_decay: Decoupled weight decay, λ, at y.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        own = {"beta": betas[0], "beta2": betas[1], "eps": eps}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **own})

    def _direction(self, state: dict[str, Any], group: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient over the root of its running mean square, which this updates: Adam without momentum."""
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        squares: torch.Tensor = state["exp_avg_sq"]
        squares.mul_(group["beta2"]).addcmul_(gradient, gradient, value=1 - group["beta2"])
        root = (squares / (1 - group["beta2"] ** state["step"])).sqrt_().add_(group["eps"])
        return torch.div(gradient, root)


class ScheduleFreeSGD(ScheduleFree):
    """Schedule-free SGD.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        momentum: β₁, the share of the average in y.
        weight_decay: λ, at y.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": momentum, "weight_decay": weight_decay})
