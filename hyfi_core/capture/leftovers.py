"""Values of a trace that something has kept: they have a shape, and no numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from hyfi_core.capture.places import calling_line
from hyfi_core.errors import RequestError


class NoTracedValues(TorchFunctionMode):
    """Refuses to compute with them: a forward hook may have kept what it saw while the model was captured."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, unless it is given such a value."""
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.Tensor) and torch._is_functional_tensor(leaf)):
                raise RequestError(
                    f"the loss reads a value of shape {tuple(leaf.shape)} that the model's forward, or a hook of it, "
                    f"has put aside ({calling_line()}); it is not kept from step to step. Have the model return it, "
                    "and take it from the answer"
                )
        return function(*args, **(kwargs or {}))
