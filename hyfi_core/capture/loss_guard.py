"""Checks of every PyTorch call that a loss makes: what it reads must be the same on the ranks that compute it.

```
a tensor that a hook stored during capture              has no value                          → refused
a weight or buffer of a stage on other ranks            its values here are not current       → refused
a parameter that no stage of this rank trains           nothing would reduce its gradient     → refused
random numbers                                          each rank would draw its own          → refused
```

The last three concern several ranks only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hyfi_core.capture.interpret import arguments_of, may_draw
from hyfi_core.capture.places import calling_line
from hyfi_core.capture.storing.stored_tensors import StoredTensor
from hyfi_core.errors import RequestError

_LEAVES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})


@contextlib.contextmanager
def watched_loss(one_rank: bool, trained: Set[int], elsewhere: Mapping[int, str]) -> Iterator[None]:
    """Context in which a loss is computed: what would differ between ranks is refused.

    Args:
        one_rank: whether there is only one rank.
        trained: ids of the parameters of this rank's stages.
        elsewhere: id -> name of the model's parameters and buffers that only stages on other ranks have.

    Raises:
        RequestError: the loss computes with something that has no value, or not the same one on every rank.
    """
    with LossGuard(one_rank, trained, elsewhere), contextlib.nullcontext() if one_rank else NoDraws():
        yield


class LossGuard(TorchFunctionMode):
    """Refuses tensors that have no value here, or whose gradient would be lost; see ``watched_loss``."""

    def __init__(self, one_rank: bool, trained: Set[int], elsewhere: Mapping[int, str]) -> None:
        super().__init__()
        self._one_rank, self._trained, self._elsewhere = one_rank, trained, elsewhere

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of the loss; refuse a tensor that has no value, or not the one that training needs."""
        for leaf in _leaves((*args, *kwargs.values()) if kwargs else args):
            if isinstance(leaf, StoredTensor):
                raise RequestError(
                    f"the loss reads a tensor of shape {tuple(leaf.shape)} that the model's forward, or one of its "
                    f"hooks, has stored ({calling_line()}); it holds no value outside of capture. Return it from the "
                    f"model and read it from the output"
                )
            # A single rank has all weights, so it cannot read those of others.
            if not self._one_rank and isinstance(leaf, torch.Tensor):
                self._refuse_foreign(leaf)
        return function(*args, **(kwargs or {}))

    def _refuse_foreign(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor whose values are on other ranks, or whose gradient would not be summed over ranks."""
        name = self._elsewhere.get(id(tensor))
        if name is not None:
            raise RequestError(
                f"the loss reads {name!r} of the model ({calling_line()}), whose current values are on the ranks of "
                f"other stages; use a plan of one stage, or weight_decay of the optimizer for a penalty on weights"
            )
        gets_gradient = isinstance(tensor, nn.Parameter) and tensor.requires_grad and torch.is_grad_enabled()
        if gets_gradient and id(tensor) not in self._trained:
            raise RequestError(
                f"the loss uses a trainable parameter of shape {tuple(tensor.shape)} that the model's forward does not "
                f"use ({calling_line()}); its gradient would not be summed over the ranks, and the model's optimizer "
                f"does not update it. Use it in the model's forward and return the result, or call "
                f"requires_grad_(False) if it is a constant"
            )


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield the leaves of arguments; tensors and numbers, the usual case, are yielded without a slow walk of trees."""
    for argument in arguments:
        if type(argument) in _LEAVES:
            yield argument
        else:
            yield from _pytree.tree_leaves(argument)


class NoDraws(TorchDispatchMode):
    """Refuses random numbers from torch's global generator, which differs between ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator; refuse one that draws random numbers from a generator of the process."""
        kwargs = kwargs or {}
        # Tags belong to ATen operators, which only a dispatch mode gets: F.dropout has none.
        if (
            torch.Tag.nondeterministic_seeded in function.tags
            and kwargs.get("generator") is None
            and may_draw(function, arguments_of(function, args, kwargs))
        ):
            raise RequestError(
                f"the loss draws random numbers ({calling_line()}), which differ between ranks; draw them in the "
                f"model's forward, or pass a generator=torch.Generator() with the same seed on every rank"
            )
        return function(*args, **kwargs)
