"""LAMB: Adam whose step in each tensor is as long as that tensor, times lr; for large batches.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²        r = m̂ / (√v̂ + ε) + λ w
    w ← w − lr ‖w‖ / ‖r‖ r        (‖w‖ / ‖r‖ is 1 where either is 0, as for a bias that starts at 0)

Norms are those of whole tensors. As in the paper, every tensor's step is adapted. Some implementations do not adapt
tensors without weight decay; without any weight decay, that makes LAMB the same as Adam.
Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020
(arXiv 1904.00962), Algorithm 2 with bias correction, φ(z) = z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """Layer-wise Adaptive Moments for Batch training.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate, the length of a step relative to the tensor's own.
        betas: Decay of the averages of the gradient and its square.
        eps: Added to the root of the average square.
        weight_decay: Decoupled weight decay, λ; inside the normalised step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights that have gradients."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                state["step"] += 1
                # m + (1 − β₁)(g − m).
                state["exp_avg"].lerp_(weight.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                update = (state["exp_avg"] / (1 - beta1 ** state["step"])).div_(root)
                update.add_(weight, alpha=group["weight_decay"])
                # Choose on the device, so that the host does not wait for a GPU.
                weight_norm, update_norm = weight.norm(), update.norm()
                ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
                weight.sub_(update.mul_(ratio), alpha=group["lr"])
