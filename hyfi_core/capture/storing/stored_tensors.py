"""What a forward, or a hook of a module, has stored during capture.

```
features = {}
model.layer4.register_forward_hook(lambda module, given, output: features.update(map=output))
```

During capture, and during the comparison at start, such a tensor is not the feature map of the user's image. Tensors
that are still alive afterwards become ``StoredTensor``: any use of them is an error that says why.

```
if size not in self.cache:
    self.cache[size] = positions(size)
```

Stored values that do not depend on the image, such as caches by size, are removed again (``Caches``), so that each
capture computes them anew, and its program has the computation.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from hyfi_core.capture.outside_names import memories, outside_values
from hyfi_core.capture.places import calling_line
from hyfi_core.capture.storing.later_forwards import Stored, is_constant
from hyfi_core.errors import RequestError

_READABLE = frozenset({"shape", "dtype"})
_WITHOUT_VALUES = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
_WITHOUT_VALUES |= {"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}
"""Functions whose results do not depend on the values of a tensor."""
_AS_ANOTHER = frozenset({"expand_as", "reshape_as", "to", "type_as", "view_as"})
"""Functions that use only the dtype, device or shape of their second tensor."""
_MOST_DEPTH = 6
"""Depth to which containers and objects are searched for caches."""
_MOST_ITEMS = 4096
"""Longer containers are not searched."""


class StoredTensor(torch.Tensor):
    """A tensor without values. It is never created: the class of a tensor that was stored is changed to this one."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return shape or dtype; refuse any other use."""
        # Reading ``x.shape`` calls the ``__get__`` of the attribute: its owner has the name.
        if getattr(getattr(function, "__self__", None), "__name__", "") in _READABLE:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        shaped = next(leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RequestError(
            f"a tensor of shape {tuple(shaped.shape)} is used at {calling_line()} that the model's forward, or one of "
            f"its hooks, stored while the engine captured the model; it has no value, and training steps store "
            f"nothing. Return it from the model; in a forward, compute it again or make it a buffer"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the shape as text: debuggers and containers call this."""
        return f"StoredTensor(shape={tuple(self.shape)}, without values)"


class StoredTensors:
    """The tensors of one trace or run that may have been stored, held weakly."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, tensors: Iterable[Any]) -> None:
        """Add tensors; what is not a tensor is ignored."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                # Not a WeakSet: it compares its items by ``==``, which tensors do element by element.
                self._seen[id(tensor)] = weakref.ref(tensor)

    def void(self) -> None:
        """Turn the tensors that are still alive into ``StoredTensor``, without values."""
        for reference in self._seen.values():
            tensor = reference()
            # Only plain tensors: the trace did not create a Parameter, or a tensor of a user's subclass.
            if tensor is not None and type(tensor) in (torch.Tensor, FakeTensor):
                # The class of the object itself changes, since the user's code has stored this object.
                tensor.__class__ = StoredTensor
                vars(tensor).clear()  # a fake tensor refers to its trace
        self._seen.clear()


class OfImage:
    """The tensors of one trace or run that depend on the values of its image, held weakly."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        reference = self._seen.get(id(tensor))
        # An id may be used again after its tensor is gone: only the object itself counts.
        return reference is not None and reference() is tensor

    def add(self, tensors: Iterable[Any]) -> None:
        """Add tensors; what is not a tensor is ignored."""
        self._seen.update((id(tensor), weakref.ref(tensor)) for tensor in tensors if isinstance(tensor, torch.Tensor))

    def follow(self, name: str, args: Iterable[Any], results: Any) -> None:
        """Add a function's results, and the tensor that it has changed, if an argument depends on the image.

        Args:
            name: name of the function.
            args: its arguments, without containers.
            results: its result.
        """
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        # Such as ``x.type_as(y)``, which reads the dtype of y, but no values.
        read = tensors[:1] if name in _AS_ANOTHER else tensors
        # Functions such as ``zeros_like`` read no values at all.
        if name in _WITHOUT_VALUES or not any(tensor in self for tensor in read):
            return
        self.add(_pytree.tree_leaves(results))
        # By PyTorch's convention, a final underscore says that the first argument changes.
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self.add(tensors[:1])


class Caches:
    """The contents of everything that a forward may store values in, before that forward.

    This is: containers in attributes of modules; containers, globals and class attributes that the model's functions
    read or assign; functions with ``functools.lru_cache``.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module) -> None:
        roots = [value for module in model.modules() for name, value in vars(module).items() if name not in _OWN]
        roots += [value for _, value in outside_values(model)]
        # Of each dict and set, the object itself and a copy of its contents. Shallow copies: containers inside of
        # containers are in the list themselves.
        self._dicts = [(container, dict(container)) for container in dicts_in(roots)]
        self._sets = [(container, set(container)) for container in _sets(roots)]
        functions, names = memories(model)
        # Of each ``functools.lru_cache``, how often it had no result; of each global or class attribute, its value.
        self._functions = [(function, function.cache_info().misses) for function in functions]
        self._names = [(holder, name, _value(holder, name)) for holder, name in names]

    def undo(self, of_image: OfImage) -> list[Stored]:
        """Remove values that the forward has stored and that do not depend on the image; counters stay.

        Args:
            of_image: the tensors that depend on the image.

        Returns:
            (holder, name, value) of the removed flags and other constants, except those stored beside tensors, such as
            their sizes; of an item of a set, (set, item, True).
        """
        stored_values: list[Stored] = []
        for container, before in self._dicts:
            changed = [(key, before.get(key, _MISSING)) for key in [*container]]
            changed = [(key, former) for key, former in changed if former is not container[key]]
            # Values that fill a gap, or replace a tensor or a flag; one that replaces a number is a counter.
            stored = [(key, former) for key, former in changed if _is_cached(former, container[key], of_image)]
            # A number stored beside a tensor belongs to the cache, such as its size.
            if all(is_constant(container[key]) for key, _ in stored):
                stored_values += [(container, key, container[key]) for key, _ in stored]
            for key, former in stored:
                _put_back(container, key, former)
        for elements, former_elements in self._sets:
            stored_values += [(elements, item, True) for item in elements - former_elements if is_constant(item)]
            # In place: the model holds this very set.
            elements &= former_elements
        for function, misses in self._functions:
            if function.cache_info().misses != misses:
                # Its cache may have fake tensors of this trace, which a real forward would then get.
                function.cache_clear()
        for holder, name, former in self._names:
            value = _value(holder, name)
            if value is not former and _is_cached(former, value, of_image):
                stored_values += [(holder, name, value)] if is_constant(value) else []
                _put_back(holder, name, former)
        return stored_values


_MISSING: Any = object()
_OWN = frozenset(vars(nn.Module()))  # registries of parameters, hooks and others
_NO_OBJECTS = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


def _is_cached(former: Any, value: Any, of_image: OfImage) -> bool:
    """Whether a value does not depend on the image, and replaces no value, a tensor or a flag."""
    if not (former is _MISSING or former is None or isinstance(former, (bool, torch.Tensor))):
        return False
    leaves = _pytree.tree_leaves(value)
    inside = [item for leaf in leaves if not isinstance(leaf, _NO_OBJECTS) for item in _attributes_of(leaf).values()]
    return not any(isinstance(leaf, torch.Tensor) and leaf in of_image for leaf in (*leaves, *inside))


def _attributes_of(item: Any) -> dict[str, Any]:
    attributes = getattr(item, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _value(holder: Any, name: str) -> Any:
    members: Any = vars(holder) if isinstance(holder, type) else holder
    return members.get(name, _MISSING)


def _put_back(holder: Any, name: Any, former: Any) -> None:
    """Restore the former value of a container's item or a class's attribute; remove it if it had none."""
    if isinstance(holder, type):
        delattr(holder, name) if former is _MISSING else setattr(holder, name, former)
    elif former is _MISSING:
        del holder[name]
    else:
        holder[name] = former


def dicts_in(roots: Iterable[Any]) -> list[Any]:
    """Return the dicts among values, in their containers, and the ``__dict__`` of their objects."""
    return [*_reachable(roots, lambda value: isinstance(value, dict))]


def _sets(roots: Iterable[Any]) -> list[Any]:
    return [*_reachable(roots, lambda value: isinstance(value, set))]


def _reachable(roots: Iterable[Any], condition: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield each object for which ``condition`` is true, once, among ``roots`` and what they contain.

    Attributes and items are searched down to ``_MOST_DEPTH``; long containers, tensors, modules and functions are not.
    """
    open_values, visited = [(value, _MOST_DEPTH) for value in roots], set[int]()
    # Not recursive: objects may hold each other.
    while open_values:
        value, depth = open_values.pop()
        if id(value) in visited or isinstance(value, _NO_OBJECTS):
            continue
        visited.add(id(value))
        if condition(value):
            yield value
        inside: Any = value.values() if isinstance(value, dict) else value
        if not isinstance(value, (dict, list, tuple)):
            inside = (_attributes_of(value),)
        if depth and len(inside) <= _MOST_ITEMS:
            open_values += [(item, depth - 1) for item in inside]


class StoringRun(TorchFunctionMode):
    """Context of a plain run of a model that records every tensor it computes.

    Args:
        stored: gets all of these tensors.
        of_image: gets the tensors that depend on the image.
    """

    def __init__(self, stored: StoredTensors, of_image: OfImage) -> None:
        super().__init__()
        self._stored = stored
        self._of_image = of_image

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and record its results, except those that are its arguments."""
        result = function(*args, **(kwargs or {}))
        leaves = _pytree.tree_leaves((args, kwargs))
        arguments = {id(leaf) for leaf in leaves}
        self._stored.note(leaf for leaf in _pytree.tree_leaves(result) if id(leaf) not in arguments)
        self._of_image.follow(getattr(function, "__name__", ""), leaves, result)
        return result
