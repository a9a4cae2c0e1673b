"""Constants of operators, such as the weights of a mean: copied once to each device that needs them.

A copy in every step would make the host wait for all work that the device has still to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Constant:
    """A tensor computed before the run.

    Args:
        values: the tensor on the host; or numbers, of which the first caller's dtype makes a tensor.
    """

    def __init__(self, values: torch.Tensor | Sequence[float]) -> None:
        self._values = values
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the constant on a device, in a dtype; do not change it."""
        key = (device, dtype)
        if key not in self._copies:
            self._copies[key] = torch.as_tensor(self._values).to(device, dtype)
        return self._copies[key]

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the constant on a tensor's device, in its dtype; do not change it."""
        return self.on(tensor.device, tensor.dtype)
