"""Constants of operators, such as the weights of a mean: copied once to each device that needs them.

A copy in every step would make the host wait for all work that the device has still to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

_STORAGES: set[int] = set()
"""Storages of all constants, whose memory must not be freed where autograd has saved one; see ``is_constant``."""


class Constant:
    """A tensor computed before the run.

    Args:
        values: the tensor on the host; or numbers, which become a tensor of the first caller's dtype.
    """

    def __init__(self, values: torch.Tensor | Sequence[float]) -> None:
        self._values = values
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the constant on a device, in a dtype; do not change it."""
        key = (device, dtype)
        if key not in self._copies:
            self._copies[key] = copied = torch.as_tensor(self._values).to(device, dtype)
            # Listed, so that ``is_constant`` knows it where autograd has saved it: by the address that all views share.
            storage = copied.untyped_storage()._cdata
            _STORAGES.add(storage)
            # Once the constant is gone, another storage may have this address.
            weakref.finalize(self, _STORAGES.discard, storage)
        return self._copies[key]

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the constant on a tensor's device, in its dtype; do not change it."""
        return self.on(tensor.device, tensor.dtype)


def is_constant(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is that of a constant, which autograd may have saved: its memory must not be freed."""
    return storage._cdata in _STORAGES
