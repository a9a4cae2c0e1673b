"""What of a module a forward may read besides its weights: two captures are alike only where this is.

dropout.p  bn.momentum  training  config.scale  replaced submodules  forward hooks  requires_grad  …
"""

from __future__ import annotations

import enum
import random
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_PLAIN = (bool, int, str, bytes, complex, enum.Enum, torch.dtype, torch.device, torch.memory_format)
_PLAIN_TYPES = frozenset({bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.memory_format})
_CONTAINERS = frozenset({list, tuple, set, frozenset, dict, OrderedDict})
_DEPTH = 4
"""How deep objects in attributes are looked into: a configuration, its parts, their settings."""
_ITEMS = 4096
"""Longer containers and arrays count as another only where they are another object."""

Attributes = dict[tuple[str, str], Hashable]


@dataclass(frozen=True, eq=False)
class _Same:
    """An object that equals itself alone; it stays alive, so that nothing else gets its address."""

    item: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.item is self.item

    def __hash__(self) -> int:
        return id(self.item)


class ModuleState(tuple[Any, ...]):
    """What ``module_state`` returns: a key of captures, whose many parts are hashed once."""

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


def module_state(model: nn.Module) -> ModuleState:
    """Return a value that is equal for two moments where a forward finds the same Python state.

    Buffers count by their presence: their values are inputs of a program. So do parameters, with ``requires_grad``.
    """
    paths = list(model.named_modules(remove_duplicate=False))
    tensors = tuple((path, n, p.requires_grad) for path, m in paths for n, p in m._parameters.items() if p is not None)
    buffers = tuple((path, n) for path, m in paths for n, b in m._buffers.items() if b is not None)
    modules = tuple((path, _Same(module)) for path, module in paths)
    return ModuleState((tensors, buffers, modules, tuple(attributes(model).items())))


def attributes(model: nn.Module) -> Attributes:
    """Return (path of a module, attribute) -> what it is, comparable; without parameters, buffers and submodules."""
    seen: dict[int, Hashable] = {}
    found: Attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _REGISTRIES:
                continue
            kind = type(value)  # a step asks this of every attribute of every module: most answers cost no call
            if kind in _PLAIN_TYPES:
                found[path, name] = (kind, value)
            elif kind in _CONTAINERS and not value:
                found[path, name] = (kind,)
            else:
                found[path, name] = _comparable(value, _DEPTH, seen)
    return found


def changed_since(before: Hashable, now: Hashable) -> list[tuple[str, str]]:
    """Return (path of a module, attribute) of what is another or new in the second of two ``module_state``."""
    assert isinstance(before, tuple) and isinstance(now, tuple)
    old = dict(before[-1])
    names = [place for place, value in now[-1] if old.get(place) != value]
    return names + [(name, "") for (name, module), was in zip(now[2], before[2], strict=False) if (name, module) != was]


def told(model: nn.Module, path: str, name: str) -> str:
    """Return what an attribute is, or of which type a module is where no attribute is named, in few words."""
    try:
        holder = model.get_submodule(path)
    except AttributeError:
        return "missing"
    value = vars(holder).get(name, "missing") if name else holder
    if value is None or isinstance(value, (*_PLAIN, float)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def is_tensor(attribute: Hashable) -> bool:
    """Whether a value of ``attributes`` stands for a tensor."""
    return isinstance(attribute, tuple) and attribute[:1] == (torch.Tensor,)


def _comparable(value: Any, depth: int, seen: dict[int, Hashable]) -> Hashable:
    if value is None or isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, _Same):
        return value
    if isinstance(value, float):
        return (float, value.hex())  # nan is nan
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, _Same(value), 0 if value.is_inference() else value._version)
    if id(value) not in seen:
        seen[id(value)] = (_Same(value), "seen")  # for an object that holds itself
        seen[id(value)] = _inside(value, depth, seen)
    return seen[id(value)]


def _inside(value: Any, depth: int, seen: dict[int, Hashable]) -> Hashable:
    if isinstance(value, np.ndarray):
        return (_Same(value), value.tobytes()) if value.size <= _ITEMS else (_Same(value),)
    if isinstance(value, random.Random):
        return (_Same(value), value.getstate())
    if isinstance(value, np.random.Generator):
        return (_Same(value), repr(value.bit_generator.state))
    if isinstance(value, torch.Generator):
        return (_Same(value), value.get_state().numpy().tobytes())
    if depth == 0 or isinstance(value, (type, nn.Module)):
        return (_Same(value),)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return (type(value), *(_comparable(item, depth - 1, seen) for item in _items(value)))
    held = getattr(value, "__dict__", None)
    return (_Same(value), *(_comparable(item, depth - 1, seen) for item in _items(held or {})))


def _items(container: Any) -> Iterator[Any]:
    if len(container) > _ITEMS:
        yield _Same(container)
    elif isinstance(container, dict):
        for key, value in container.items():
            yield from (key, value)
    else:
        yield from container
