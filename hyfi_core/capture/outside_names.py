"""Values that the functions of a model read outside of it: globals, class attributes, closures.

```
SCALE = 0.5                              a global
class Head(nn.Module): gain = 1.0        a class attribute
config.depth, settings.scale             an attribute of a global object or module
lambda x: x * factor                     a value of a closure, a default argument, an argument of a partial
Head.forward = other, act = torch.tanh   a method or a function that was replaced
os.environ["SCALE"]                      the environment
```

A trace records their current values. The names that a function reads are found once, in its byte code; their values are
looked up at every step. Methods and attributes of a class count only if code that a forward reaches has their names:
large libraries keep the loading of weights, configurations and exports in the same classes.
"""

from __future__ import annotations

import argparse
import enum
import functools
import os
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hyfi_core.capture.code_names import chains_in, globals_assigned_in, words_in
from hyfi_core.capture.places import INSTALLED, is_users, is_users_file

_SETTINGS = (torch.dtype, torch.device, complex, bytes, enum.Enum)
_VALUES = (bool, int, float, str, type(None), list, tuple, dict, set, frozenset, *_SETTINGS)
_HOLDERS = (types.SimpleNamespace, argparse.Namespace, np.ndarray, nn.Module)
_PLAIN = frozenset({bool, int, float, str, type(None), torch.Tensor, nn.Parameter, torch.dtype, torch.device})
_GENERATORS = (random.Random, np.random.Generator, torch.Generator)
_IDENTITIES = (types.FunctionType, types.BuiltinFunctionType)
_WRAPPERS = {
    staticmethod: "__func__",
    classmethod: "__func__",
    types.MethodType: "__func__",
    property: "fget",
    functools.cached_property: "func",
}
_LISTS = frozenset({list, tuple})
_CONTAINERS = frozenset({list, tuple, set, dict, OrderedDict})
_OWN = frozenset({"_parameters", "_buffers", "_modules"})
HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
_CREATING = frozenset({"__init__", "__new__", "__post_init__"})
_NEVER_REACHED = frozenset({"__del__", "__getstate__", "__init_subclass__", "__reduce__", "__repr__", "__setstate__"})
_MAKE_NAMES = frozenset({"getattr", "attrgetter", "methodcaller", "vars", "__dict__", "eval", "exec", "globals"})
"""Functions by which code reads attributes whose names are not in the code."""
_NOTHING = object()
_DEPTH = 6
"""Depth to which calls between functions of installed packages are followed; of the user's own, all are."""

NamedValues = Iterator[tuple[str, Any]]
_Member = tuple[type, str, Any, bool]
"""(class, name, value, whether the class is the user's own)."""


def outside_values(model: nn.Module, attributes: Iterable[Any] | None = None) -> NamedValues:
    """Yield (name, value) of all that functions of the model read outside of it; a repeated name gets a number.

    Args:
        model: the user's module.
        attributes: those of its modules that are not plain values, if they are known.
    """
    if attributes is None:
        attributes = (value for module in model.modules() for name, value in vars(module).items() if name not in _OWN)
    counts: dict[str, int] = {}
    yielded: set[tuple[str, int]] = set()
    for name, value in _Walk().of_model(model, attributes):
        if (name, id(value)) not in yielded:
            yielded.add((name, id(value)))
            counts[name] = count = counts.get(name, 0) + 1
            yield (name if count == 1 else f"{name} ({count})"), value


Memoised = Any  # a function with functools.lru_cache, whose type is private


def memories(model: nn.Module) -> tuple[list[Memoised], list[tuple[Any, str]]]:
    """Return where functions of the model may store values, other than in containers.

    Args:
        model: the user's module.

    Returns:
        functions with ``functools.lru_cache``; (dict of globals or class, name) of what functions assign.
    """
    walk = _Walk()
    attributes = (value for module in model.modules() for name, value in vars(module).items() if name not in _OWN)
    for _ in walk.of_model(model, attributes):
        pass
    return walk.memoised, walk.assigned


class _KnownClass:
    """What a class held when it was last read; kept alive, so that no address is used again.

    Attributes:
        methods: (name, function) of the user's functions in it, unwrapped.
        values: the same of plain values that count.
        objects: the same of others.
    """

    def __init__(self, holder: type) -> None:
        self._held = vars(holder)
        self._items, self._names = [*self._held.values()], [*self._held]
        self._ids = [*map(id, self._items)]
        functions = {name: _unwrapped(value) for name, value in self._held.items()}
        functions = {name: value for name, value in functions.items() if isinstance(value, types.FunctionType)}
        self._functions, self._codes = [*functions.values()], [f.__code__ for f in functions.values()]
        self.methods = [(name, function) for name, function in functions.items() if _is_users(function)]
        self.values = [(n, v) for n, v in self._held.items() if isinstance(v, _VALUES) and not n.startswith("__")]
        members = [(n, v) for n, v in self._held.items() if not isinstance(v, (*_VALUES, types.FunctionType))]
        self.objects = [(n, v) for n, v in members if type(v) not in _WRAPPERS and not n.startswith("__")]

    def is_same(self) -> bool:
        """Whether it holds the same objects under the same names, and its functions the same code."""
        return (
            [*map(id, self._held.values())] == self._ids
            and [*self._held] == self._names
            and [function.__code__ for function in self._functions] == self._codes
        )


_CLASSES: dict[type, _KnownClass] = {}


class _Walk:
    """One walk over the user's functions and classes that a forward reaches, each once.

    A method or attribute of a class is reached if code that is reached has its name, as an attribute or as a text. Code
    of the user that makes up names as it runs (``getattr``) reaches all of the user's classes.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # id -> the object, so that no address is used again
        self.memoised: list[Memoised] = []
        self.assigned: list[tuple[Any, str]] = []
        self._names: set[str] = {"forward"}
        self._waiting: dict[str, list[_Member]] = {}
        self._reached: list[_Member] = []
        self._reaches_all = False

    def of_model(self, model: nn.Module, attributes: Iterable[Any]) -> NamedValues:
        """Yield what the methods of the model's classes read, then what ``attributes`` of its modules read."""
        for kind in {type(module): None for module in model.modules()}:
            self._add_class(kind)
        yield from self._of_reached()
        for value in attributes:
            kind = type(value)
            if kind not in _PLAIN and (kind not in _CONTAINERS or value):
                yield from self._of_attribute(value)
        yield from self._of_reached()

    def _of_reached(self) -> NamedValues:
        """Yield what the members of classes in ``_reached`` read; reading them may reach others."""
        while self._reached:
            yield from self._of_member(*self._reached.pop())

    def _of_member(self, holder: type, name: str, value: Any, own: bool) -> NamedValues:
        full = f"{holder.__qualname__}.{name}"
        if isinstance(value, (*_VALUES, *_HOLDERS)):
            yield full, value
        elif _is_users(value):
            if own or name == "forward":
                yield full, value
            yield from self._of_function(value, _DEPTH)
        else:
            yield from self._found_by_own(full, value, _DEPTH)

    def _of_attribute(self, value: Any) -> NamedValues:
        """Yield what an attribute of a module reads; the attribute itself is compared with the module."""
        kind = type(value)
        if kind in _LISTS:
            inside: Any = value
        elif isinstance(value, dict):
            inside = value.values()
        else:
            inside = (value,)
        for item in inside:
            of_item: Any = type(item)
            if of_item in _PLAIN or issubclass(of_item, nn.Module):
                continue
            if issubclass(of_item, types.MethodType):
                yield from self._of_method(item.__qualname__, item, _DEPTH)
            elif issubclass(of_item, (types.FunctionType, functools.partial)):
                yield from self._of_function(item, _DEPTH)
            elif callable(item):  # as a hook
                yield from self._of_object(of_item.__qualname__, item)
            elif _is_own_class(of_item):
                self._add_class(of_item)

    def _of_method(self, name: str, method: types.MethodType, depth: int) -> NamedValues:
        yield from self._of_object(name, method.__self__)
        yield from self._of_function(method, depth)

    def _of_object(self, name: str, item: Any) -> NamedValues:
        kind: Any = type(item)
        if _is_own_class(kind) and not issubclass(kind, (nn.Module, torch.Tensor)):
            yield name, item
            self._add_class(kind)

    def _is_new(self, item: Any) -> bool:
        if id(item) in self._seen:
            return False
        self._seen[id(item)] = item
        return True

    def _keep_memoised(self, values: Iterable[Any]) -> None:
        functions = (_unwrapped(value) for value in values)
        self.memoised += [value for value in functions if isinstance(value, functools._lru_cache_wrapper)]

    def _add_class(self, kind: type, created: bool = False) -> None:
        """Add the members of a class and its bases; ``created``: by code that is reached."""
        for holder in kind.__mro__:
            if created:
                self._reached += self._waiting.pop(_created_by(holder), ())
            if not self._is_new(holder):
                continue
            own, entry = _is_own_class(holder), _CLASSES.get(holder)
            if entry is None or not entry.is_same():
                entry = _CLASSES[holder] = _KnownClass(holder)
            self._keep_memoised(value for _, value in entry.objects)
            if own:
                unset = (name for name, value in entry.values if value is None or type(value) is bool)
                self.assigned += [(holder, name) for name in unset]
                self.assigned += [(holder, name) for name, value in entry.objects if isinstance(value, torch.Tensor)]
            members = entry.methods + (entry.values if entry.methods or own else []) + (entry.objects if own else [])
            for name, value in members:
                self._add_member((holder, name, value, own), created)

    def _add_member(self, member: _Member, created: bool) -> None:
        """Note a member of a class as reached, or as waiting until code that is read names it."""
        holder, name, _, own = member
        creates = name in _CREATING
        # Python calls ``__getattr__``, ``__call__`` and others itself, so no code has their names.
        implicit = name.startswith("__") and name.endswith("__") and not creates and name not in _NEVER_REACHED
        if implicit or name in self._names or (own and self._reaches_all) or (creates and created):
            self._reached.append(member)
        elif name not in _NEVER_REACHED:
            self._waiting.setdefault(_created_by(holder) if creates else name, []).append(member)

    def _read_names(self, code: types.CodeType, own: bool) -> None:
        """Reach all that has one of the names in code."""
        words = words_in(code)
        for name in sorted((words - self._names).intersection(self._waiting)):
            self._reached += self._waiting.pop(name)
        self._names |= words
        if own and not self._reaches_all and not _MAKE_NAMES.isdisjoint(words):
            self._reaches_all = True
            for members in self._waiting.values():
                self._reached += [member for member in members if member[3]]
                members[:] = [member for member in members if not member[3]]

    def _of_function(self, function: Any, depth: int) -> NamedValues:
        """Yield what a function may read: defaults, variables of its closure, and globals that it names."""
        function = _unwrapped(function)
        if isinstance(function, functools.partial):
            yield from self._found("partial()", function, own=True, depth=depth)
            return
        if not _is_users(function) or not self._is_new(function):
            return
        name, own = function.__qualname__, _is_own(function.__code__)
        self._read_names(function.__code__, own)
        if own and (function.__defaults__ or function.__kwdefaults__):
            yield f"{name}()", (function.__defaults__, function.__kwdefaults__)
        for cell, variable in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            try:
                content: Any = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from self._found(f"{name}: {variable}", content, own, depth)
        self.assigned += [(function.__globals__, assigned) for assigned in globals_assigned_in(function.__code__)]
        for chain in chains_in(function.__code__):
            if own:
                self.assigned += _holders(function.__globals__, chain)
            yield from self._found(*_looked_up(function.__globals__, chain), own, depth)

    def _found(self, name: str, value: Any, own: bool, depth: int) -> NamedValues:
        """Yield what a function reads under a name; ``own``: it is the user's code, which is followed everywhere."""
        self._keep_memoised((value,))
        if value is sys.modules:
            return  # an import changes nothing that a forward computes
        if isinstance(value, (*_VALUES, *_GENERATORS)):
            yield name, value
        elif own and (value is os.environ or value is os.getenv):
            yield "os.environ", dict(os.environ)
        elif isinstance(value, types.FunctionType) and depth:
            if own:
                yield name, value
            yield from self._of_function(value, depth if own else depth - 1)
        elif own:
            yield from self._found_by_own(name, value, depth)

    def _found_by_own(self, name: str, value: Any, depth: int) -> NamedValues:
        if isinstance(value, (types.BuiltinFunctionType, torch.Tensor)):
            yield name, value
        elif isinstance(value, functools.partial):
            yield name, (value.args, value.keywords)
            yield from self._found(name, value.func, own=True, depth=depth)
        elif isinstance(value, type):
            if _is_own_class(value):
                self._add_class(value, created=True)
        elif isinstance(value, types.MethodType):
            yield from self._of_method(name, value, depth)
        elif "__wrapped__" in (attributes := _dict_of(value)):  # functools.lru_cache
            yield from self._found(name, attributes["__wrapped__"], own=True, depth=depth)
        else:
            yield from self._of_object(name, value)


def _looked_up(names: Mapping[str, Any], chain: tuple[str, ...]) -> tuple[str, Any]:
    """Return (name, value) of a chain ``name.attribute.attribute``, as far as it needs no computation."""
    value = names.get(chain[0], _NOTHING)
    for number, attribute in enumerate(chain[1:], 1):
        attribute_value = _NOTHING
        # The value itself counts as a whole; its attributes are methods or computed.
        if value is not os.environ and not isinstance(value, (*_VALUES, types.FunctionType, torch.Tensor, nn.Module)):
            attribute_value = _attribute(value, attribute)
        if isinstance(value, (types.ModuleType, type)) and _is_replaceable(attribute_value):
            attribute_value = _NOTHING
        if attribute_value is _NOTHING:
            return ".".join(chain[:number]), value
        value = attribute_value
    return ".".join(chain), value


def _holders(names: Mapping[str, Any], chain: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """Yield (class or dict, name) of the attributes in a chain, to which a function may assign."""
    value = names.get(chain[0], _NOTHING)
    for attribute in chain[1:]:
        owner = value if isinstance(value, type) else _dict_of(value)
        if attribute not in (vars(owner) if isinstance(owner, type) else owner):
            return
        yield owner, attribute
        value = _attribute(value, attribute)


def _is_replaceable(value: Any) -> bool:
    """Whether this is a function of PyTorch, which a trace in another thread may replace in its module or class."""
    return isinstance(value, _IDENTITIES) and value is not os.getenv and not _is_users(value)


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute from the dicts of an object, a module or a class with its bases."""
    kinds = holder.__mro__ if isinstance(holder, type) else ()
    for members in (_dict_of(holder), *(vars(kind) for kind in kinds)):
        if name in members:
            return _unwrapped(members[name]) if kinds else members[name]
    return _NOTHING


def _dict_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes that an object holds, without calling its ``__getattr__``, which may raise."""
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _unwrapped(value: Any) -> Any:
    """Return the function of a method, a property or a static method; other values unchanged."""
    kind = type(value)
    return getattr(value, _WRAPPERS[kind]) if kind in _WRAPPERS else value


def _created_by(holder: type) -> str:
    """Return the key under which methods wait that run when an object is created."""
    return f"creates {id(holder)}"


@functools.cache
def _is_own_class(kind: Any) -> bool:
    """Whether a class is the user's own, and not of an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" if file is None else is_users_file(file) and INSTALLED not in file


@functools.cache
def _is_own(code: types.CodeType) -> bool:
    return is_users(code) and INSTALLED not in code.co_filename


@functools.cache
def _is_users_code(code: types.CodeType) -> bool:
    return is_users(code)


def _is_users(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _is_users_code(value.__code__)
