"""Tensors that a forward, or a hook of a module, has stored outside of the model during capture.

```
features = {}
model.layer4.register_forward_hook(lambda module, given, output: features.update(map=output))
```

During capture, and during the comparison at start, such a tensor is not the feature map of the user's image. Once this
is over, those that are still alive become ``StoredTensor``: any use of them is an error that says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from hyfi_core.capture.places import calling_line
from hyfi_core.errors import RequestError

_READABLE = frozenset({"shape", "dtype"})


class StoredTensor(torch.Tensor):
    """A tensor without values. It is never created: the class of a tensor that was stored is changed to this one."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return shape and dtype; refuse all else."""
        if getattr(getattr(function, "__self__", None), "__name__", "") in _READABLE:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        found = next(leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RequestError(
            f"a tensor of shape {tuple(found.shape)} is used at {calling_line()} that the model's forward, or one of "
            f"its hooks, stored while the engine captured the model; it has no value, and training steps store "
            f"nothing. Return it from the model; in a forward, compute it again or make it a buffer"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe it: debuggers and containers call this."""
        return f"StoredTensor(shape={tuple(self.shape)}, without values)"


class StoredTensors:
    """The tensors of one trace or run that may have been stored, held weakly."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, tensors: Iterable[Any]) -> None:
        """Add tensors; what is not a tensor is ignored."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._seen[id(tensor)] = weakref.ref(tensor)

    def void(self) -> None:
        """Take the values of those that are still alive."""
        for reference in self._seen.values():
            tensor = reference()
            if tensor is not None and type(tensor) in (torch.Tensor, FakeTensor):
                tensor.__class__ = StoredTensor
                vars(tensor).clear()  # what a fake tensor knows of its trace
        self._seen.clear()


class StoringRun(TorchFunctionMode):
    """Context of a plain run of a model: notes every tensor that it computes.

    Args:
        stored: where they are noted.
    """

    def __init__(self, stored: StoredTensors) -> None:
        super().__init__()
        self._stored = stored

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; a result that is an argument existed before."""
        result = function(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in _pytree.tree_leaves((args, kwargs))}
        self._stored.note(leaf for leaf in _pytree.tree_leaves(result) if id(leaf) not in given)
        return result
