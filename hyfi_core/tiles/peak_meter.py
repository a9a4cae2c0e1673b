"""Memory of tensors while a piece of code runs, on any device: from the sizes of all storages that it creates."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMeter(TorchDispatchMode):
    """Context that counts the bytes of all tensors created in it, as long as they live.

    Workspaces inside of operators are not counted.

    Attributes:
        live_bytes: bytes that are alive now.
        peak_bytes: the largest ``live_bytes`` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and count its outputs."""
        result = function(*args, **(kwargs or {}))
        # Storages of arguments do not count: views and changes in place allocate nothing.
        before = {id(leaf.untyped_storage()) for leaf in _pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        """Count a storage once, until it is freed; ``known``: ids of storages that existed before."""
        number, size = id(storage), storage.nbytes()
        if number in self._storages or number in known or not size:
            return

        def freed(_: Any) -> None:
            self.live_bytes -= size
            self._storages.pop(number, None)

        # PyTorch keeps one Python object for a storage as long as that lives, even in autograd's graph
        # alone, so that this reference dies with the memory.
        self._storages[number] = weakref.ref(storage, freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
