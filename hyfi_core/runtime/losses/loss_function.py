"""The user's loss as ranks call it: inside autocast, with checks of what it reads and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from hyfi_core.capture.loss_guard import watched_loss
from hyfi_core.errors import RequestError

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
LossOver = Literal["auto", "batch", "microbatch"]
"""What a loss is computed over:

- "batch": once over the outputs of all micro-batches and replicas. Where not all forwards of a step come before all its
  backwards, each forward then runs twice.
- "microbatch": the mean over micro-batches, of a loss that is a mean of terms of single samples. This is checked on
  random outputs with the labels of each step; a loss that is not is refused.
- "auto": "microbatch" for losses of torch that are such a mean, without class weights and ignored labels, which is also
  checked on random logits at start, because they may have been patched; else "batch".
"""


@dataclass(frozen=True)
class LossFunction:
    """Calls a loss as plain PyTorch does, and checks it.

    Attributes:
        loss: the user's function of (output, labels).
        autocasting: creates the autocast context.
        alone: whether there is only one rank.
        trained: ids of the parameters of this rank's stages.
        elsewhere: id -> name of tensors of the model that only stages on other ranks have.
    """

    loss: Loss
    autocasting: Callable[[], AbstractContextManager[Any]]
    alone: bool
    trained: Set[int]
    elsewhere: Mapping[int, str]

    def __call__(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, a tensor with one value and a graph.

        Raises:
            RequestError: it reads something that differs between ranks, or is not a scalar that depends on the output.
        """
        with watched_loss(self.alone, self.trained, self.elsewhere), self.autocasting():
            return checked_loss(self.loss, output, labels)


def checked_loss(loss: Loss, output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return ``loss(output, labels)``.

    Raises:
        RequestError: it is not a scalar tensor, or has no gradient.
    """
    # The default loss, whose own error would not say that ``output`` selects the logits.
    if loss is F.cross_entropy and not isinstance(output, torch.Tensor):
        kind = type(output).__name__
        raise RequestError(f"the model's output is a {kind}; pass output=lambda output: ... to select its logits")
    try:
        value: object = loss(output, labels)
    except RuntimeError as error:
        # The output is a leaf here: its gradient begins the backward of the model.
        if "leaf Variable that requires grad is being used in an in-place" not in str(error):
            raise
        raise RequestError(
            "the loss changes the model's output in place; write output = output * 2 instead of output.mul_(2)"
        ) from error
    if not isinstance(value, torch.Tensor):
        plain = value is None or isinstance(value, (bool, int, float))
        description = f"the value {value!r}" if plain else f"the type {type(value).__name__}"
        raise RequestError(f"the loss has {description}; return a scalar tensor, the loss of the whole batch")
    if value.numel() != 1:
        raise RequestError(
            f"the loss has shape {tuple(value.shape)}; return a scalar tensor, such as the mean of a loss for each "
            f'sample (reduction="mean" in losses of torch)'
        )
    if not value.requires_grad:
        raise RequestError("the loss does not depend on the model's output; compute it from its first argument")
    return value
