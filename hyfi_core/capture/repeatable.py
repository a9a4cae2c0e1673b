"""Random operators that draw the same numbers in every call, so that two runs can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GOLDEN = 0.6180339887498949


class RepeatableDraws(TorchDispatchMode):
    """Dropout and bernoulli depend only on the shape, so the order and type of these operators do not matter.

    Other random operators start from a fixed seed, so the caller must restore torch's generators.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, or return repeatable numbers instead."""
        aten = torch.ops.aten
        if function is aten.native_dropout.default and args[2]:
            kept = _pattern(args[0]) < 1.0 - args[1]
            scale = 0.0 if args[1] == 1.0 else 1.0 / (1.0 - args[1])
            return args[0] * kept * scale, kept
        if function is aten.bernoulli_.float:
            return args[0].copy_(_pattern(args[0]) < (args[1] if len(args) > 1 else 0.5))
        if function is aten.bernoulli.p:
            return (_pattern(args[0]) < args[1]).to(args[0].dtype)
        if function is aten.bernoulli.default:
            return (_pattern(args[0]) < args[0]).to(args[0].dtype)
        if torch.Tag.nondeterministic_seeded in function.tags:
            torch.manual_seed(0)
        return function(*args, **(kwargs or {}))


def _pattern(like: torch.Tensor) -> torch.Tensor:
    """Return evenly distributed numbers in [0, 1) of the same shape."""
    steps = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return (steps * _GOLDEN + 0.3).frac().reshape(like.shape)
