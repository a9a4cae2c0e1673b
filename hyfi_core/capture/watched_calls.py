"""Checks of every PyTorch call that a forward makes while it is traced.

``torch.export`` records computations and drops the effect of calls on gradients. Autograd is active during the trace
and shows what would be lost:

```
with torch.no_grad(), inference_mode()   no gradient goes through the result        → result.detach()
x.data                                   a constant                                 → x.detach()
x.data.clamp_(), in place in no_grad     a change hidden from autograd              → refused
x.random_(2, 9)                          its operator "from" is a word of Python     → x.random_(7).add_(2)
x.data = y, x.detach_()                  the tensor object itself changes           → refused
f = Function.apply, hooks on tensors     their backward would be dropped            → refused
random.random(), np.random.rand()        the first number would be kept             → refused
```
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from hyfi_core.capture.places import calling_line
from hyfi_core.capture.storing.stored_tensors import OfImage, StoredTensors
from hyfi_core.errors import RequestError

_NO_HOOK = (
    "registers a hook on a tensor, which would not be called; change the gradients that engine.gather_gradients() "
    "returns"
)
_NO_SWITCH = (
    "changes requires_grad of a tensor in its forward, which capture cannot record; change it before parallelize"
)
_REFUSED = {
    "register_hook": _NO_HOOK,
    "register_post_accumulate_grad_hook": _NO_HOOK,
    "backward": "calls backward in its forward, which is not supported; call it in the loss",
    "detach_": "detaches a tensor in place, which capture cannot record; write x = x.detach()",
    "requires_grad_": _NO_SWITCH,
}
_REFUSED_ATTRIBUTES = {
    "data": "sets .data of a tensor, which capture cannot record; compute a new tensor, or use buffer.copy_(...)",
    "grad": "sets .grad of a tensor, which capture cannot record",
    "requires_grad": _NO_SWITCH,
}


class WatchedCalls(TorchFunctionMode):
    """Preserves or refuses what a trace would lose, in the thread that enters it.

    Args:
        model: the traced model.
        stored: notes the tensors of the trace.

    Attributes:
        checkpoints: current nesting depth of ``torch.utils.checkpoint`` calls.
        of_image: the values that depend on the image.
    """

    def __init__(self, model: nn.Module, stored: StoredTensors) -> None:
        super().__init__()
        self._model = model
        self._stored = stored
        self._storages_with_gradients: set[StorageWeakRef] = set()
        # States of the generators of Python and NumPy, and torch's seed: a forward that changes one is refused.
        self._generators_before = host_randomness()
        self._seed_before = torch.initial_seed()
        self._watching = False
        self.checkpoints = 0  # how many calls of torch.utils.checkpoint the current one is nested in
        self.of_image = OfImage()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and check its side effects."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._attribute(function, args)
        _refuse(function, name, args)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise RequestError(
                f"the forward draws from a torch.Generator of its own, at {calling_line()}, which capture cannot "
                f"record; draw without generator=: random numbers depend on the engine's seed and the step"
            )
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.refuse_functions(tensors)
        self.refuse_host_randomness()
        # Versions count all changes in place, also through views and by functions whose names do not say so.
        versions = [_version(tensor) for tensor in tensors]
        self._track(tensors)
        result = (_random_between if name == "random_" else function)(*args, **kwargs)
        for tensor, version in zip(tensors, versions, strict=True):
            if _version(tensor) != version:
                self._check_change(tensor)
        # Export drops no_grad: only an explicit detach keeps gradients away in the program.
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            result = _pytree.tree_map_only(torch.Tensor, lambda item: _detached(item, tensors), result)
        self._stored.note(leaf for leaf in (*tensors, *_pytree.tree_leaves(result)) if isinstance(leaf, FakeTensor))
        self.of_image.follow(name, tensors, result)
        return result

    def refuse_functions(self, tensors: Sequence[Any], returned: bool = False) -> None:
        """Refuse values computed by a custom ``autograd.Function``.

        Raises:
            RequestError: there is one.
        """
        for tensor in tensors:
            # Autograd makes a subclass of this class for each Function of the user, not for PyTorch's own operators.
            node: Any = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if isinstance(node, BackwardCFunction):
                owner: Any = type(node)._forward_cls  # type: ignore[attr-defined]
                if owner.__module__ == "torch._library.autograd":
                    continue  # an operator of torch.library: capture keeps it, with its backward
                used = "returned" if returned else f"used at {calling_line()}"
                raise RequestError(
                    f"the model calls {owner.__module__}.{owner.__qualname__}, an autograd.Function, whose own "
                    f"backward would be lost (its result is {used}); call {owner.__name__}.apply(...) in the forward, "
                    f"not a name given to it before, or write it with PyTorch operators that have the gradient you "
                    f"need (x + (f(x) - x).detach() passes gradients past f)"
                )

    def refuse_host_randomness(self) -> None:
        """Refuse a forward that has drawn from Python's or NumPy's generator, or has seeded torch's.

        Raises:
            RequestError: it has.
        """
        for name, before, after in zip(
            ("random", "np.random"), self._generators_before, host_randomness(), strict=True
        ):
            if before != after:
                raise RequestError(
                    f"the forward draws random numbers from {name}, at or before {calling_line()}; capture would "
                    f"keep the first number. Draw with torch (torch.rand(())), which gives new numbers in every step"
                )
        if torch.initial_seed() != self._seed_before:
            raise RequestError(
                f"the forward seeds torch's generator, at or before {calling_line()}; remove this: random numbers "
                f"depend on the engine's seed and the step"
            )

    def _attribute(self, function: Any, args: Any) -> Any:
        """Return an attribute that the forward reads of a tensor; ``x.data`` becomes ``x.detach()``.

        A trace records ``detach``. ``function``: the getter of the attribute.
        """
        if _attribute_name(function) == "data" and isinstance(args[0], torch.Tensor):
            self._track(args)
            # ``x.data`` itself would be a constant of the trace: the value of the one image that is traced.
            detached = args[0].detach()
            self._stored.note([detached])
            self.of_image.follow("data", args, detached)
            return detached
        result = function(*args)
        self.of_image.follow("", args, result)
        return result

    def begin(self) -> None:
        """Start watching."""
        # Not by ``with``: the forward begins in one hook and ends in another.
        super().__enter__()  # type: ignore[no-untyped-call]
        self._watching = True

    def end(self) -> None:
        """Stop watching; may be called again."""
        if self._watching:
            self._watching = False
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _track(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the storages of values that carry gradients, to recognise other views of them."""
        # By storage: ``.data``, ``.detach()`` and views are other tensor objects with the same memory.
        self._storages_with_gradients.update(StorageWeakRef(t.untyped_storage()) for t in tensors if t.requires_grad)

    def _check_change(self, tensor: torch.Tensor) -> None:
        """Refuse an in-place change that autograd has not recorded, or that recomputation would repeat."""
        is_recorded = torch.is_grad_enabled() and tensor.requires_grad
        if not is_recorded and StorageWeakRef(tensor.untyped_storage()) in self._storages_with_gradients:
            raise RequestError(
                f"the forward changes a tensor of shape {tuple(tensor.shape)} in place and hidden from autograd "
                f"(through .data, .detach() or in no_grad), which capture cannot record: {calling_line()}. Compute a "
                f"new tensor; change weights after engine.update()"
            )
        if self.checkpoints and any(tensor is b for m in self._model.modules() for b in m._buffers.values()):
            raise RequestError(
                f"the forward updates running statistics inside torch.utils.checkpoint, where PyTorch counts each "
                f"batch twice: {calling_line()}. Switch the model's checkpointing off; plan.recompute saves the same "
                f"memory"
            )


def _random_between(tensor: torch.Tensor, *limits: Any, **named: Any) -> torch.Tensor:
    """``Tensor.random_``; the operator of two limits is named ``from``, which export cannot write as Python."""
    # As PyTorch: ``random_(to=9)`` and ``random_(9)`` are the same.
    limits += (named.pop("to"),) if "to" in named else ()
    if len(limits) == 2 and limits[1] is not None:
        return tensor.random_(limits[1] - limits[0], **named).add_(limits[0])
    return tensor.random_(*limits, **named)


def host_randomness() -> tuple[Any, Any]:
    """Return the states of Python's and NumPy's global generators, for comparison."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), (state["state"]["pos"], state["state"]["key"].tobytes())


def _refuse(function: Any, name: str, args: Any) -> None:
    """Refuse calls whose effect a trace would lose."""
    advice = _REFUSED_ATTRIBUTES.get(_attribute_name(function)) if name == "__set__" else _REFUSED.get(name)
    # Setting requires_grad to its present value changes nothing.
    if advice is _NO_SWITCH and args[0].requires_grad == (args[1] if len(args) > 1 else True):
        return
    if advice is not None and not (name == "detach_" and not args[0].requires_grad):
        raise RequestError(f"the model {advice}: {calling_line()}")


def _attribute_name(function: Any) -> str:
    return getattr(getattr(function, "__self__", None), "__name__", "")


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode have no version: asking for it raises.
    return -1 if tensor.is_inference() else tensor._version


def _detached(result: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a result without gradient, detached by an operator; unchanged if it is one of the arguments."""
    if result.requires_grad or not result.is_floating_point() or any(result is tensor for tensor in args):
        return result
    return result.detach()
