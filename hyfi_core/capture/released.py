"""Released tensors: parameters and buffers of a model whose values only other ranks have.

    rank 0    enter.weight  real      fc.weight  meta
    rank 1    enter.weight  meta      fc.weight  real

A tensor on the meta device takes the place of each. It has the shape, strides, dtype, ``requires_grad`` and hooks of
the released one, so that the model can be captured again. Computing with it and values is an error: PyTorch's own
convolutions would return memory that was never written, and ``average.add_(weight)`` would do nothing.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from hyfi_core.capture.module_state import tensors_in_attributes
from hyfi_core.errors import RequestError
from hyfi_core.process_memory import return_freed_now

Former = list[tuple["weakref.ref[torch.Tensor]", str]]
"""(a released tensor, its name): code outside of the model may still hold it."""


class ReleasedTensor(torch.Tensor):
    """A tensor on the meta device that refuses to be computed with together with values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch that gets a released tensor, which has no values; refuse to compute with it.

        Raises:
            RequestError: another argument has values; changing the released tensor in place is allowed, and does
                nothing.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # An initialisation or ``weight.clamp_()`` only changes a tensor that is not read.
        first = next(iter((*args, *kwargs.values())), None)
        changes_it = name.endswith("_") and not name.endswith("__") and isinstance(first, ReleasedTensor)
        # Without this, the call below and every attribute that is read here would call this function again.
        with torch._C.DisableTorchFunctionSubclass():
            # A property, such as ``shape``, takes no values.
            leaves = () if changes_it or name == "__get__" else _pytree.tree_leaves((args, kwargs))
            if any(isinstance(item, torch.Tensor) and not item.is_meta for item in leaves):
                raise RequestError(
                    f"{name} was called with values and a released tensor of the model, whose values are on other "
                    "ranks only; call the engine (predict, gather_state_dict), or pass release=False"
                )
            result = func(*args, **kwargs)
            plain = isinstance(result, torch.Tensor) and not isinstance(result, ReleasedTensor) and result.is_meta
            return result.as_subclass(ReleasedTensor) if plain else result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return another released tensor."""
        # With the memo, tied tensors stay tied in a copy.
        if id(self) not in memo:
            memo[id(self)] = _released_like(self)
        copied: torch.Tensor = memo[id(self)]
        return copied


class ReleasedParameter(ReleasedTensor, nn.Parameter):
    """A released parameter."""


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> parameter or buffer; tied ones under each of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's tensors; if all are on the meta device, torch's default one for their values."""
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    device_with_values = next((device for device in devices if device.type != "meta"), None)
    return device_with_values or (torch.get_default_device() if devices else torch.device("cpu"))


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter, float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def release(model: nn.Module, names: Collection[str]) -> Former:
    """Put tensors on the meta device in place of parameters and buffers, and return their memory to the system.

    Tensors that an attribute of a module also holds stay, since the attribute would keep their memory, and the forward
    may read it. Tensors of a subclass stay, too.

    Args:
        model: changed.
        names: names of the tensors; all names of a tied one.

    Returns:
        (weak reference to a released tensor, its name) of each: code of the user, such as the loss, may still hold it.
    """
    kept_ids = tensors_in_attributes(model)
    chosen = {n: t for n, t in named_tensors(model).items() if n in names and _is_plain(t) and id(t) not in kept_ids}
    former = [(weakref.ref(tensor), name) for name, tensor in chosen.items()]
    _replace(model, {id(tensor): _without_values(tensor) for tensor in chosen.values()})
    # This dict would keep the tensors alive.
    chosen.clear()
    gc.collect()  # a capture leaves reference cycles that hold them
    # glibc keeps freed memory for the process unless it is asked to return it.
    return_freed_now()
    return former


@contextlib.contextmanager
def stood_in(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Context in which fake tensors, on the device of the others, stand in for released ones during a trace."""
    tensors = {id(tensor): tensor for tensor in named_tensors(model).values()}
    released = {key: tensor for key, tensor in tensors.items() if tensor.is_meta}
    if not released:
        yield
        return
    device = device_of(model)
    with mode:
        fakes = {key: _like(tensor, device) for key, tensor in released.items()}
    _replace(model, fakes)
    try:
        yield
    finally:
        _replace(model, {id(fake): released[key] for key, fake in fakes.items()})


def fill(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Put parameters and buffers with values in the place of those on the meta device.

    Args:
        model: changed.
        values: values by one of the names of each tensor, with its shape, strides and dtype; used as they are.
    """
    named = named_tensors(model)
    replacements = {}
    for name, value in values.items():
        former = named[name]
        replacements[id(former)] = (
            nn.Parameter(value, former.requires_grad) if isinstance(former, nn.Parameter) else value
        )
        # A new object: what the user has attached to the former tensor, such as hooks, goes with it.
        _adopt(replacements[id(former)], former)
    _replace(model, replacements)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    empty = _released_like(tensor)
    _adopt(empty, tensor)
    return empty


def _released_like(tensor: torch.Tensor) -> torch.Tensor:
    like = _like(tensor, torch.device("meta")).detach()
    if isinstance(tensor, nn.Parameter):
        return ReleasedParameter(like, tensor.requires_grad)
    return like.as_subclass(ReleasedTensor)


def _adopt(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give ``target`` the attributes and hooks of ``tensor``; hooks of released tensors never run, but are checked."""
    vars(target).update(vars(tensor))
    target._backward_hooks = tensor._backward_hooks
    target._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # With the strides, too: a channels-last weight gives another program than a plain one.
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _replace(model: nn.Module, replacements: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters and buffers; ``replacements``: id of the present tensor -> the new one."""
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None and id(tensor) in replacements:
                    # No name is added or removed, so the dict may change while it is walked.
                    registry[name] = replacements[id(tensor)]  # type: ignore[assignment]
                    if isinstance(module, nn.RNNBase):  # it holds a list of its parameters, too
                        setattr(module, name, replacements[id(tensor)])
