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
import functools
import os
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hyfi_core.capture.code_names import chains_in, globals_assigned_in, words_in
from hyfi_core.capture.members import (
    VALUES,
    dict_of,
    holders,
    is_users_function,
    known_class,
    looked_up,
    unwrapped,
)
from hyfi_core.capture.places import INSTALLED, is_users, is_users_file

_HOLDERS = (types.SimpleNamespace, argparse.Namespace, np.ndarray, nn.Module)
_PLAIN = frozenset({bool, int, float, str, type(None), torch.Tensor, nn.Parameter, torch.dtype, torch.device})
_GENERATORS = (random.Random, np.random.Generator, torch.Generator)
_LISTS = frozenset({list, tuple})
_CONTAINERS = frozenset({list, tuple, set, dict, OrderedDict})
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
_CREATING = frozenset({"__init__", "__new__", "__post_init__"})
"""Methods that run when an object of the class is created."""
_NEVER_REACHED = frozenset({"__del__", "__getstate__", "__init_subclass__", "__reduce__", "__repr__", "__setstate__"})
"""Methods that no forward runs."""
_MAKE_NAMES = frozenset({"getattr", "attrgetter", "methodcaller", "vars", "__dict__", "eval", "exec", "globals"})
"""Functions by which code reads attributes whose names are not in the code."""
_DEPTH = 6
"""Depth to which calls between functions of installed packages are followed; of the user's own, all are."""

NamedValues = Iterator[tuple[str, Any]]


class _ClassMember(NamedTuple):
    """A method or an attribute of a class; ``own``: whether the class is the user's own, not of a package."""

    holder: type
    name: str
    value: Any
    own: bool


def outside_values(model: nn.Module, attributes: Iterable[Any] | None = None) -> NamedValues:
    """Yield (name, value) of all that functions of the model read outside of it; a repeated name gets a number.

    Args:
        model: the user's module.
        attributes: the attributes of its modules that are not plain values, if they have been collected already.
    """
    if attributes is None:
        attributes = _attributes_of_modules(model)
    counts: dict[str, int] = {}
    yielded: set[tuple[str, int]] = set()
    for name, value in _Walk().of_model(model, attributes):
        if (name, id(value)) not in yielded:
            yielded.add((name, id(value)))
            counts[name] = count = counts.get(name, 0) + 1
            yield (name if count == 1 else f"{name} ({count})"), value


Memoised = Any  # a function with functools.lru_cache, whose type is private


def memories(model: nn.Module) -> tuple[list[Memoised], list[tuple[Any, str]]]:
    """Return where functions of the model may store values: caches, globals and class attributes, but not containers.

    Args:
        model: the user's module.

    Returns:
        Functions with ``functools.lru_cache``; (dict of globals or class, name) of variables that functions may assign.
    """
    walk = _Walk()
    # What the walk yields is not needed: it fills these lists on its way.
    for _ in walk.of_model(model, _attributes_of_modules(model)):
        pass
    return walk.memoised, walk.assigned


def _attributes_of_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the attributes of a model and its submodules that are neither parameters, buffers nor submodules."""
    for module in model.modules():
        yield from (value for name, value in vars(module).items() if name not in _REGISTRIES)


class _Walk:
    """One walk over the user's functions and classes that a forward reaches, each once.

    A method or attribute of a class is reached if its name is in code that is reached, as an attribute or a text. Code
    of the user that computes names as it runs (``getattr``) reaches all members of the user's classes.

    Attributes:
        memoised: reached functions with ``functools.lru_cache``.
        assigned: (dict of globals or class, name) of what functions may assign.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # id -> the object, so that no address is used again
        self.memoised: list[Memoised] = []
        self.assigned: list[tuple[Any, str]] = []
        self._names: set[str] = {"forward"}  # in code that was read
        self._waiting: dict[str, list[_ClassMember]] = {}  # name -> members whose names no code has yet
        self._reached: list[_ClassMember] = []  # members still to be read
        self._reaches_all = False  # whether the user's code computes names

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
        """Yield a member of the class ``holder`` that a forward reaches, and what it reads.

        ``own``: whether the class is the user's own, not of a package.
        """
        full_name = f"{holder.__qualname__}.{name}"
        if isinstance(value, (*VALUES, *_HOLDERS)):
            yield full_name, value
        elif is_users_function(value):
            if own or name == "forward":
                yield full_name, value
            yield from self._of_function(value, _DEPTH)
        else:
            yield from self._of_value_in_own_code(full_name, value, _DEPTH)

    def _of_attribute(self, value: Any) -> NamedValues:
        """Yield what an attribute of a module, or an item of it, reads when the forward calls or uses it.

        The attribute itself is not yielded: it is compared with the other attributes of the module.
        """
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
            elif callable(item):  # an object that is called, such as a hook
                yield from self._of_object(of_item.__qualname__, item)
            elif _is_own_class(of_item):
                self._add_class(of_item)

    def _of_method(self, name: str, method: types.MethodType, depth: int) -> NamedValues:
        """Yield what a bound method reads: its object and its function's names."""
        yield from self._of_object(name, method.__self__)
        yield from self._of_function(method, depth)

    def _of_object(self, name: str, item: Any) -> NamedValues:
        """Yield an object of the user's own class, and add its class; modules and tensors are compared elsewhere."""
        kind: Any = type(item)
        if _is_own_class(kind) and not issubclass(kind, (nn.Module, torch.Tensor)):
            yield name, item
            self._add_class(kind)

    def _is_new(self, item: Any) -> bool:
        """Whether an object is reached for the first time; record it."""
        if id(item) in self._seen:
            return False
        self._seen[id(item)] = item
        return True

    def _keep_memoised(self, values: Iterable[Any]) -> None:
        """Add to ``memoised`` the values with a ``functools.lru_cache``."""
        functions = (unwrapped(value) for value in values)
        self.memoised += [value for value in functions if isinstance(value, functools._lru_cache_wrapper)]

    def _add_class(self, kind: type, created: bool = False) -> None:
        """Add the members of a class and its bases; ``created``: whether reached code creates objects of it."""
        for holder in kind.__mro__:
            if created:
                # Methods such as ``__init__``, if the class was added before without `created`.
                self._reached += self._waiting.pop(_created_by(holder), ())
            if not self._is_new(holder):
                continue
            own, known = _is_own_class(holder), known_class(holder)
            self._keep_memoised(value for _, value in known.objects)
            if own:
                # Class attributes in which code may keep something from one forward to the next: flags, and tensors.
                unset = (name for name, value in known.values if value is None or type(value) is bool)
                self.assigned += [(holder, name) for name in unset]
                self.assigned += [(holder, name) for name, value in known.objects if isinstance(value, torch.Tensor)]
            # Of classes of packages, only numbers and texts that their methods may read, and no other objects.
            members = known.methods + (known.values if known.methods or own else []) + (known.objects if own else [])
            for name, value in members:
                self._add_member(_ClassMember(holder, name, value, own), created)

    def _add_member(self, member: _ClassMember, created: bool) -> None:
        """Record a member of a class as reached, or as waiting until its name is in code that is read.

        Methods such as ``__init__`` wait instead until reached code creates an object of the class (``created``).
        """
        holder, name, _, own = member
        creates = name in _CREATING
        # Python itself calls ``__getattr__``, ``__call__`` and others: they are reached though no code has their names.
        implicit = name.startswith("__") and name.endswith("__") and not creates and name not in _NEVER_REACHED
        if implicit or name in self._names or (own and self._reaches_all) or (creates and created):
            self._reached.append(member)
        elif name not in _NEVER_REACHED:
            self._waiting.setdefault(_created_by(holder) if creates else name, []).append(member)

    def _read_names(self, code: types.CodeType, own: bool) -> None:
        """Record the names in code: members of classes with one of these names, which waited for it, are reached.

        If the user's ``own`` code computes names (``getattr``), it may name any member of the user's classes.
        """
        words = words_in(code)
        for name in sorted((words - self._names).intersection(self._waiting)):
            self._reached += self._waiting.pop(name)
        self._names |= words
        if own and not self._reaches_all and not _MAKE_NAMES.isdisjoint(words):
            self._reaches_all = True
            for members in self._waiting.values():
                self._reached += [member for member in members if member.own]
                members[:] = [member for member in members if not member.own]

    def _of_function(self, function: Any, depth: int) -> NamedValues:
        """Yield what a function may read: defaults, variables of its closure, and globals that it names."""
        function = unwrapped(function)
        if isinstance(function, functools.partial):
            yield from self._of_value("partial()", function, own=True, depth=depth)
            return
        if not is_users_function(function) or not self._is_new(function):
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
            yield from self._of_value(f"{name}: {variable}", content, own, depth)
        self.assigned += [(function.__globals__, assigned) for assigned in globals_assigned_in(function.__code__)]
        for chain in chains_in(function.__code__):
            if own:
                self.assigned += holders(function.__globals__, chain)
            yield from self._of_value(*looked_up(function.__globals__, chain), own, depth)

    def _of_value(self, name: str, value: Any, own: bool, depth: int) -> NamedValues:
        """Yield a value that a function reads, if a forward may depend on it, and the values that it reads in turn.

        Args:
            name: name of the value in the function.
            value: any.
            own: whether the function is the user's own code, whose calls are followed to any depth.
            depth: how many more nested calls between functions of packages are followed.
        """
        self._keep_memoised((value,))
        if value is sys.modules:
            return  # an import changes nothing that a forward computes
        if isinstance(value, (*VALUES, *_GENERATORS)):
            yield name, value
        elif own and (value is os.environ or value is os.getenv):
            yield "os.environ", dict(os.environ)
        elif isinstance(value, types.FunctionType) and depth:
            if own:
                yield name, value
            yield from self._of_function(value, depth if own else depth - 1)
        elif own:
            yield from self._of_value_in_own_code(name, value, depth)

    def _of_value_in_own_code(self, name: str, value: Any, depth: int) -> NamedValues:
        """Yield what the user's own code reads through an object, class, method or other value that it names.

        ``_of_value`` calls it for such values: in the code of installed packages they are not followed.
        """
        if isinstance(value, (types.BuiltinFunctionType, torch.Tensor)):
            yield name, value
        elif isinstance(value, functools.partial):
            yield name, (value.args, value.keywords)
            yield from self._of_value(name, value.func, own=True, depth=depth)
        elif isinstance(value, type):
            if _is_own_class(value):
                # Code that names a class may create objects of it, which runs methods such as ``__init__``.
                self._add_class(value, created=True)
        elif isinstance(value, types.MethodType):
            yield from self._of_method(name, value, depth)
        elif "__wrapped__" in (attributes := dict_of(value)):  # functools.lru_cache
            yield from self._of_value(name, attributes["__wrapped__"], own=True, depth=depth)
        else:
            yield from self._of_object(name, value)


def _created_by(holder: type) -> str:
    """Return the key of ``_waiting`` for methods of a class that run when an object is created."""
    return f"creates {id(holder)}"


@functools.cache
def _is_own_class(kind: Any) -> bool:
    """Whether a class is the user's own, and not of an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" if file is None else is_users_file(file) and INSTALLED not in file


@functools.cache
def _is_own(code: types.CodeType) -> bool:
    """Whether code is the user's own, and not of an installed package."""
    return is_users(code) and INSTALLED not in code.co_filename
