"""The Python state of a module that a forward may read. A capture is valid as long as it does not change.

dropout.p  bn.momentum  training  config.scale  replaced submodules  forward hooks  requires_grad  …
"""

from __future__ import annotations

import contextlib
import enum
import functools
import random
import types
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hyfi_core.capture.outside_names import HOOKS, outside_values
from hyfi_core.capture.places import is_users
from hyfi_core.capture.storing.later_forwards import PLAIN_TYPES
from hyfi_core.capture.storing.stored_tensors import StoredTensor

REGISTRIES = frozenset(
    {
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
        "_flat_weights", "_flat_weight_refs",  # of LSTM, GRU and RNN: their parameters again
    }
)  # fmt: skip
"""Attributes of a module that are not compared by value."""
_PLAIN = (bool, int, str, bytes, complex, enum.Enum, torch.dtype, torch.device, torch.memory_format)
_GENERATORS = (random.Random, np.random.Generator, torch.Generator)
_CONTAINERS = frozenset({list, tuple, set, frozenset, dict, OrderedDict})
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_DEPTH = 12
"""Depth to which objects in attributes are compared."""
_OBJECTS = 20_000
"""Number of objects whose contents are compared; further ones are compared by identity."""
_ITEMS = 4096
"""Of longer containers, the items are compared by identity."""

Attributes = dict[tuple[str, str], Hashable]
_STORED: Hashable = ("stored by capture",)
OUTSIDE = "outside of the model"
"""Path under which values outside of the model are listed."""


@dataclass(frozen=True, eq=False)
class _Same:
    """Compares an object by identity and keeps it alive, so that its address is not reused."""

    item: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.item is self.item

    def __hash__(self) -> int:
        return id(self.item)


@dataclass(frozen=True)
class _Identities:
    """Compares many objects by identity and keeps them alive."""

    ids: tuple[int, ...]
    items: tuple[Any, ...] = field(compare=False, repr=False)


class ModuleState(tuple[Any, ...]):
    """Result of ``module_state``: a cache key whose hash is computed once."""

    @cached_property
    def _hash(self) -> int:
        # Each step looks the state up in dicts: hashing all attributes each time would take as long as comparing them.
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


def module_state(model: nn.Module) -> ModuleState:
    """Return a hashable value that changes when Python state that a forward may read changes.

    Of buffers and parameters, only the presence and ``requires_grad`` count: their values are inputs of a program.
    """
    # With duplicates: one module under two names differs from two equal modules.
    paths = list(model.named_modules(remove_duplicate=False))
    tensors = tuple((path, n, p.requires_grad) for path, m in paths for n, p in m._parameters.items() if p is not None)
    buffers = tuple((path, n) for path, m in paths for n, b in m._buffers.items() if b is not None)
    modules = tuple((path, (_Same(module), type(module))) for path, module in paths)
    return ModuleState((tensors, buffers, modules, tuple((attributes(model) | outside_attributes(model)).items())))


def outside_attributes(
    model: nn.Module, roots: Iterable[Any] | None = None, own: Mapping[int, Hashable] | None = None
) -> Attributes:
    """Return the values that functions of the model read outside of it, under the path ``OUTSIDE``.

    Args:
        model: the user's module.
        roots: the attributes of its modules that are neither constant nor empty, if they are known.
        own: ``own_objects`` of the model, if they are known.
    """
    values = own_objects(model) if own is None else dict(own)
    return {
        # A program holds these tensors themselves, so that changes in place need no new program.
        (OUTSIDE, name): (_Same(value),) if type(value) in _TENSORS else _comparable(value, _DEPTH, values)
        for name, value in outside_values(model, roots)
    }


def own_objects(model: nn.Module) -> dict[int, Hashable]:
    """Return the initial ``values`` for ``comparable``: parameters, buffers and modules, each by identity.

    The values of parameters and buffers are inputs of a program; the attributes of modules are compared one by one.
    """
    return {id(item): (_Same(item),) for item in (*model.parameters(), *model.buffers(), *model.modules())}


def attributes(model: nn.Module) -> Attributes:
    """Return (path of a module, attribute) -> a comparable value; without parameters, buffers and submodules."""
    # Of an attribute that holds one of the model's own tensors or modules, only which one it is counts.
    known_values = own_objects(model)
    result: Attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # Hooks by identity: `outside_attributes` has the values that their code reads.
            if name in HOOKS:
                result[path, name] = tuple(_Same(hook) for hook in value.values())
            elif name not in REGISTRIES:
                result[path, name] = comparable(value, known_values)
    return result


def tensors_in_attributes(model: nn.Module) -> set[int]:
    """Return the ids of parameters and buffers that attributes of modules, or values outside of the model, hold."""
    own = own_objects(model)
    open_values: list[Hashable] = [*attributes(model).values(), *outside_attributes(model).values()]
    ids, visited = set[int](), set[int]()
    while open_values:
        value = open_values.pop()
        # Walked with a list: nested values may be deeper than Python's recursion.
        if isinstance(value, _Same):
            ids |= {id(value.item)} & own.keys()
        elif isinstance(value, _Identities):
            ids |= {*value.ids} & own.keys()
        elif isinstance(value, tuple) and id(value) not in visited:
            visited.add(id(value))
            open_values += value
    return ids


def comparable(value: Any, values: dict[int, Hashable]) -> Hashable:
    """Return a hashable value that changes when ``value`` does; ``values``: id of an object -> its result, to reuse."""
    kind = type(value)  # called for every attribute of every module: the common cases must be fast
    if kind in PLAIN_TYPES:
        return (kind, value)
    if is_empty(value):
        return (kind,)
    return _comparable(value, _DEPTH, values)


def is_empty(value: Any) -> bool:
    """Whether a value is an empty container, like the hook registries of most modules."""
    return type(value) in _CONTAINERS and not value


def changed_since(before: Hashable, after: Hashable) -> list[tuple[str, str]]:
    """Return (path of a module, attribute) of attributes that are new or changed in ``after``.

    A replaced module is (path, ""). Not listed: attributes that were removed, and changes of ``requires_grad`` or of
    which parameters and buffers exist. ``before`` and ``after``: results of ``module_state``.
    """
    assert isinstance(before, tuple) and isinstance(after, tuple)
    *_, modules_before, attributes_before = before
    *_, modules_after, attributes_after = after
    values_before = dict(attributes_before)
    names = [key for key, value in attributes_after if values_before.get(key) != value]
    pairs = zip(modules_before, modules_after, strict=False)
    return names + [(path, "") for was, (path, module) in pairs if (path, module) != was]


def same_modes(before: Hashable, after: Hashable) -> bool:
    """Whether two results of ``module_state`` have the same modules, tensors, ``training`` and ``requires_grad``."""
    assert isinstance(before, tuple) and isinstance(after, tuple)
    # Three of the four parts: the last has the attributes.
    return before[:-1] == after[:-1] and all(name != "training" for _, name in changed_since(before, after))


def describe_value(model: nn.Module, path: str, name: str) -> str:
    """Return a short description of an attribute's value, or of the type of a module if no attribute is named."""
    if path == OUTSIDE:
        value = dict(outside_values(model)).get(name, "not there")
        return repr(value)[:60] if isinstance(value, (*_PLAIN, float)) else f"a {type(value).__name__}"
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return "missing"
    value = vars(module).get(name, "missing") if name else module
    # Of numbers, texts and the like the value itself; of other objects only the type.
    if value is None or isinstance(value, (*_PLAIN, float)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def is_counted(before: Hashable, after: Hashable) -> bool:
    """Whether a number changed or was appended to a list, also within containers, or a generator was drawn from.

    Args:
        before: what `comparable` returned for a value: a tuple that begins with its type or, compared by identity, with
            the object itself; its contents follow.
        after: the same, after a forward.
    """
    if before == after or not isinstance(before, tuple) or not isinstance(after, tuple):
        return False
    # A growing list of tensors may be a cache; one of numbers counts calls.
    if before[:1] == after[:1] == (list,) and len(after) > len(before):
        return any(isinstance(item, tuple) and item[0] in (int, float) for item in after[len(before) :])
    if len(before) != len(after):
        return False
    if before[0] is after[0] and before[0] in (int, float):
        return True
    if isinstance(before[0], _Same) and isinstance(before[0].item, _GENERATORS):
        return True
    inside = isinstance(before[0], _Same) or before[0] in _CONTAINERS
    return inside and any(is_counted(a, b) for a, b in zip(before[1:], after[1:], strict=True))


def is_tensor(attribute: Hashable) -> bool:
    """Whether a value of ``attributes`` represents a tensor."""
    return isinstance(attribute, tuple) and attribute[:1] == (torch.Tensor,)


def _comparable(value: Any, depth: int, values: dict[int, Hashable]) -> Hashable:
    """Return a hashable value; two of them are equal only if ``value`` has not changed in between.

    Args:
        value: any object.
        depth: levels of containers and objects to look into.
        values: id -> result, of all objects reached so far.
    """
    if value is None or isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (_Same, _Identities)):
        return value
    if isinstance(value, float):
        return (float, value.hex())  # nan is nan
    if isinstance(value, StoredTensor):
        return _STORED
    if isinstance(value, torch.Tensor):
        if id(value) in values:
            return values[id(value)]
        # The version counts changes in place. Tensors of inference mode have none, and asking raises.
        return (torch.Tensor, _Same(value), 0 if value.is_inference() else value._version)
    if id(value) not in values:
        values[id(value)] = (_Same(value), "seen")  # for an object that contains itself
        values[id(value)] = _inside(value, depth, values)
    return values[id(value)]


def _inside(value: Any, depth: int, values: dict[int, Hashable]) -> Hashable:
    """Return what `_comparable` returns for an object: its identity and its contents."""
    if isinstance(value, np.ndarray):
        data = value.tobytes()
        # For a large array a checksum, so that the state does not contain a copy.
        return (_Same(value), data if value.size <= _ITEMS else zlib.crc32(data))
    if isinstance(value, random.Random):
        return (_Same(value), value.getstate())
    if isinstance(value, np.random.Generator):
        return (_Same(value), repr(value.bit_generator.state))
    if isinstance(value, torch.Generator):
        with _disable_current_modes():  # during a trace
            return (_Same(value), value.get_state().numpy().tobytes())
    # Classes and modules by identity: ``outside_attributes`` lists what a forward reads of them.
    if depth == 0 or len(values) > _OBJECTS or isinstance(value, (type, types.ModuleType)):
        return (_Same(value),)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _contained(value, depth, values)
    members = [*_items(getattr(value, "__dict__", {})), *_slots(value)]
    if isinstance(value, types.FunctionType):
        members.append(value.__code__)  # a notebook that reloads a file replaces it
        # Only inside other values: what the closure of an attribute itself holds is listed by `outside_attributes`.
        if depth < _DEPTH:
            members += _closure_values(value)
    if isinstance(value, functools.partial):
        members += [value.func, value.args, value.keywords]
    # Identity and contents: a changed object and another equal one are both changes.
    return (_Same(value), *(_comparable(item, depth - 1, values) for item in members))


def _closure_values(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values that a user's function has captured from enclosing functions."""
    for cell in function.__closure__ or () if is_users(function.__code__) else ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def _slots(value: Any) -> Iterator[Any]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield from (name, getattr(value, name, None))


def _items(container: Any) -> Iterator[Any]:
    """Yield the items of a container, or a dict's keys and values in turn; of a large one, all as ``_Identities``."""
    if len(container) > _ITEMS:
        items = tuple(chain.from_iterable(container.items()) if isinstance(container, dict) else container)
        yield _Identities(tuple(map(id, items)), items)
    elif isinstance(container, dict):
        for key, value in container.items():
            yield from (key, value)
    else:
        yield from container


def _contained(container: Any, depth: int, values: dict[int, Hashable]) -> Hashable:
    """Return a container's hashable value, without ``StoredTensor``: only a capture has stored these in it."""
    inside = [_comparable(item, depth - 1, values) for item in _items(container)]
    if any(item is _STORED for item in inside):
        if isinstance(container, dict):
            # ``_items`` yields keys and values in turn.
            pairs = zip(inside[::2], inside[1::2], strict=True)
            inside = [item for pair in pairs if pair[1] is not _STORED for item in pair]
        else:
            inside = [item for item in inside if item is not _STORED]
        # A tuple of such tensors alone was stored as a whole: the container that holds it leaves it out, too.
        if not inside and isinstance(container, tuple):
            return _STORED
    if isinstance(container, (set, frozenset)):
        return (type(container), frozenset(inside))  # equal sets may list their items in different orders
    return (type(container), *inside)
