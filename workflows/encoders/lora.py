"""Low-rank adaptation of an encoder (LoRA): its weights stay, and each matrix gets a small trained update.

::

    W (rows, columns)  →  W + 2 · B A        A (rank, columns) random, B (rows, rank) zero: at first nothing changes

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022 (arXiv 2106.09685). The update is a
parametrisation of the weight, so that it also acts where a module uses its weight directly, as attention does.
"""

from __future__ import annotations

import math
import re

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from hyfi_core.errors import RequestError

SCALE = 2.0
"""α / rank of the paper."""
_PART = re.compile(r"(^|\.)parametrizations\.\w+\.0\.(down|up)$")


class LowRankUpdate(nn.Module):
    """A parametrisation that adds a low-rank update to a weight.

    Args:
        weight: ``(rows, columns)``; only its shape, dtype and device are used.
        rank: Rank of the update.
    """

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(weight.new_empty(rank, columns))
        # Zero, so that the product is zero; both zero would have zero gradients forever.
        self.up = nn.Parameter(weight.new_zeros(rows, rank))
        # As nn.Linear draws its weights: uniform in ± 1 / √columns.
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight with its update, in the weight's precision, under autocast, too."""
        # Autocast would compute the product in bfloat16.
        with torch.autocast(weight.device.type, enabled=False):
            return weight + SCALE * (self.up @ self.down)


def add_lora(encoder: nn.Module, rank: int) -> int:
    """Add updates to the matrices of all linear and attention layers, in place; return their number.

    Args:
        encoder: The encoder; its outputs do not change, because updates are zero at first.
        rank: Rank of the updates.

    Raises:
        RequestError: It has no such layer, or a matrix that is not larger than the rank.
    """
    matrices = [
        (path, module, name)  # of the module, and the name of its matrix
        for path, module in encoder.named_modules()
        for name in _matrices(module)
        if getattr(module, name, None) is not None
    ]
    if not matrices:
        raise RequestError(f"train: lora:{rank}: the encoder has no linear layers; use last:N, norms or all")
    for path, module, name in matrices:
        weight = getattr(module, name)
        if rank >= min(weight.shape):
            raise RequestError(
                f"train: lora:{rank}: {path}.{name} is {tuple(weight.shape)}; use a rank below {min(weight.shape)}"
            )
    # After all checks: a refusal leaves the encoder as it was.
    for _, module, name in matrices:
        register_parametrization(module, name, LowRankUpdate(getattr(module, name), rank))
    return len(matrices)


def merge_lora(model: nn.Module) -> int:
    """Replace each weight that has an update by the sum of both, in place; return the number of updates.

    The weights then have the names that they have in a model without updates.
    """
    merged = 0
    for module in model.modules():
        # A list, because removing changes what is iterated.
        for name in [*getattr(module, "parametrizations", {})]:
            # The user's own parametrisations stay.
            if any(isinstance(part, LowRankUpdate) for part in module.parametrizations[name]):  # type: ignore[index]
                remove_parametrizations(module, name, leave_parametrized=True)
                merged += 1
    return merged


def is_lora(name: str) -> bool:
    """Whether a parameter belongs to an update."""
    return _PART.search(name) is not None


def _matrices(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return ("weight",) if isinstance(module, nn.Linear) else ()
