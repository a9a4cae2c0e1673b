"""A check of losses declared as means over samples: on random outputs, the loss of all against the mean of parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.runtime.losses.loss_function import Loss, checked_loss
from hyfi_core.runtime.losses.step_loss import is_float

# float64 first; a loss that fails in it, such as one with weights in float32, is tried in float32.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Dtype of the outputs -> largest relative difference; a loss may compute in float32 inside."""
_SEED = 20


def why_not_mean(
    loss: Loss,
    pick: Callable[[list[Any]], Any],
    like: Sequence[Any],
    labels: torch.Tensor,
    samples: int,
    device: torch.device,
    parts: Sequence[int] = (),
    quick: bool = False,
) -> str | None:
    """Return why a loss is not a mean of terms of single samples, None if no difference was found.

    The loss of all labels is compared with the mean of the losses of equal parts of them, in value and gradients, on
    outputs from three distributions. torch's generator is not changed.

    Args:
        loss: the user's loss function.
        pick: turns the leaves of the output into the loss's argument.
        like: leaves of the output of a micro-batch; tensors on the meta device.
        labels: labels of the whole batch, of all replicas; on the host.
        samples: number of samples of a micro-batch.
        device: device of the model, used if the loss cannot compute on the host.
        parts: numbers of equal parts to try; numbers that do not divide that of the labels are left out.
        quick: whether one distribution suffices.
    """
    if len(labels) == 1:
        return None
    if isinstance(loss, nn.Module):  # its state stays as it is
        loss = copy.deepcopy(loss, {id(parameter): parameter for parameter in loss.parameters()})
    failure: Exception | None = None
    # A loss may draw numbers; trying it must not move the user's generator.
    with torch.random.fork_rng(devices=[]):
        for trial_device in dict.fromkeys((torch.device("cpu"), device)):
            for dtype, tolerance in _TOLERANCES.items():
                outputs = _outputs(like, labels, samples, dtype)
                results = []
                for output in outputs:
                    results.append(_differs(loss, pick, output, labels, parts, tolerance, trial_device))
                    if quick and not isinstance(results[-1], Exception):
                        break
                compared = [result for result in results if not isinstance(result, Exception)]
                if compared:
                    return next((result for result in compared if result is not None), None)
                failure = failure or next(result for result in results if isinstance(result, Exception))
    return f"it fails on random outputs ({type(failure).__name__}: {failure})"


def _outputs(
    like: Sequence[Any], labels: torch.Tensor, samples: int, dtype: torch.dtype
) -> Iterator[list[tuple[Any, bool]]]:
    """Yield random outputs for all labels, each a list of (leaf, whether its first dim is the batch)."""
    generator = torch.Generator().manual_seed(_SEED)
    # Logits near zero, saturated ones, and probabilities, which are all that some losses take.
    for scale in (1.0, 8.0, None):  # None: probabilities
        leaves: list[tuple[Any, bool]] = []
        for leaf in like:
            if not isinstance(leaf, torch.Tensor):
                leaves.append((leaf, False))
                continue
            batched = leaf.shape[:1] == (samples,)
            shape = (len(labels), *leaf.shape[1:]) if batched else leaf.shape
            if not is_float(leaf):
                leaves.append((torch.zeros(shape, dtype=leaf.dtype), batched))
            elif scale is None:
                leaves.append((torch.rand(shape, dtype=dtype, generator=generator), batched))
            else:
                leaves.append((torch.randn(shape, dtype=dtype, generator=generator) * scale, batched))
        yield leaves


def _differs(
    loss: Loss,
    pick: Callable[[list[Any]], Any],
    output: list[tuple[Any, bool]],
    labels: torch.Tensor,
    parts: Sequence[int],
    tolerance: float,
    device: torch.device,
) -> str | Exception | None:
    """Return how the mean loss of parts differs from the loss of all samples; None if it does not.

    If the loss cannot be computed, the error is returned.
    """
    count = len(labels)
    output = [(leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batched) for leaf, batched in output]
    labels = labels.to(device)
    try:
        total, gradients = _loss_in_parts(loss, pick, output, labels, 1)
        for number in dict.fromkeys(number for number in parts if count % number == 0):
            mean, part_gradients = _loss_in_parts(loss, pick, output, labels, number)
            if not all(map(torch.isfinite, (total, mean))):
                return ValueError("the loss is not finite")
            if abs(float(total - mean)) > tolerance * max(1.0, abs(float(total))):
                return (
                    f"on random outputs it is {float(total):.6g} for all {count} samples, but the mean over {number} "
                    f"parts of them is {float(mean):.6g}"
                )
            if any(_far(a, b, tolerance) for a, b in zip(gradients, part_gradients, strict=True)):
                return f"its gradients for {count} samples are not those of the mean over {number} parts of them"
    except RequestError as refusal:
        return str(refusal)
    except Exception as error:  # the loss is the user's code
        return error
    return None


def _loss_in_parts(
    loss: Loss, pick: Callable[[list[Any]], Any], output: list[tuple[Any, bool]], labels: torch.Tensor, parts: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the mean of the losses of ``parts`` equal parts, and its gradients for the leaves of the output."""
    leaves = [(leaf.clone().requires_grad_() if is_float(leaf) else leaf, batched) for leaf, batched in output]
    size = len(labels) // parts
    with torch.enable_grad():
        values = []
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            chosen = [leaf[part] if batched else leaf for leaf, batched in leaves]
            values.append(checked_loss(loss, pick(chosen), labels[part]).reshape(()))
        mean = torch.stack(values).mean()
    floats = [leaf for leaf, _ in leaves if is_float(leaf)]
    # Gradients, too: two losses may have one value on these outputs and still differ.
    gradients = torch.autograd.grad(mean, floats, allow_unused=True)
    zeros = (torch.zeros_like(leaf) for leaf in floats)
    return mean.detach(), [zero if grad is None else grad for zero, grad in zip(zeros, gradients, strict=True)]


def _far(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    largest = float(a.abs().max()) if a.numel() else 0.0
    return not math.isfinite(largest) or bool(((a - b).abs() > tolerance * max(largest, 1e-3)).any())
