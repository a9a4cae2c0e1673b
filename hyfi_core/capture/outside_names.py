"""Values that the functions of a model read outside of it: globals, class attributes, closures.

```
SCALE = 0.5                              a global
class Head(nn.Module): gain = 1.0        a class attribute
config.depth, settings.scale             an attribute of a global object or module
lambda x: x * factor                     a value of a closure
```

A trace records their current values. The names that a function reads are found once, in its byte code; their values are
looked up at every step.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hyfi_core.capture.places import is_users

_VALUES = (bool, int, float, str, type(None), list, tuple, dict, set)
_FUNCTIONS = frozenset({types.FunctionType, types.MethodType})
_LISTS = frozenset({list, tuple})
_DEPTH = 6
"""Depth to which calls of the user's functions are followed."""


def outside_values(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the plain values that functions of the model's classes read outside of the model."""
    for holder in dict.fromkeys(holder for kind in {type(m): None for m in model.modules()} for holder in kind.__mro__):
        yield from _of_class(holder)
    for module in model.modules():
        for value in vars(module).values():
            if type(value) in _FUNCTIONS:
                yield from _of_function(value)
            elif type(value) in _LISTS:
                for function in value:
                    if type(function) in _FUNCTIONS:
                        yield from _of_function(function)


def _of_class(holder: type) -> Iterator[tuple[str, Any]]:
    methods = [value for value in vars(holder).values() if _is_users(value)]
    if methods:
        yield from (
            (f"{holder.__qualname__}.{name}", value)
            for name, value in vars(holder).items()
            if isinstance(value, _VALUES) and not name.startswith("__")
        )
    for method in methods:
        yield from _of_function(method)


def _of_function(
    function: Any, depth: int = _DEPTH, seen: set[types.CodeType] | None = None
) -> Iterator[tuple[str, Any]]:
    function = getattr(function, "__func__", function)
    seen = set() if seen is None else seen
    if not _is_users(function) or function.__code__ in seen:
        return
    seen.add(function.__code__)
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        try:
            found: Any = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _found(f"{function.__qualname__}: {name}", found, depth, seen)
    for chain in _names(function.__code__):
        name, found = _looked_up(function.__globals__, chain)
        yield from _found(name, found, depth, seen)


def _found(name: str, value: Any, depth: int, seen: set[types.CodeType]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _VALUES):
        yield name, value
    elif isinstance(value, types.FunctionType) and depth:
        yield from _of_function(value, depth - 1, seen)


def _looked_up(names: Mapping[str, Any], chain: tuple[str, ...]) -> tuple[str, Any]:
    """Return (name, value) of a chain ``name.attribute.attribute``, as far as objects have it in ``__dict__``."""
    value = names.get(chain[0], _NOTHING)
    for number, attribute in enumerate(chain[1:], 1):
        held = getattr(value, "__dict__", {})
        if isinstance(value, (*_VALUES, types.FunctionType)) or attribute not in held:
            if not isinstance(value, _VALUES):  # computed attributes are not supported
                value = _NOTHING
            return ".".join(chain[:number]), value
        value = held[attribute]
    return ".".join(chain), value


_NOTHING = object()


@functools.cache
def _names(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that code reads, with the attributes that it reads of them: chains of names."""
    found: dict[tuple[str, ...], None] = {}
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(step.argval))
            continue
        if chain:
            found[tuple(chain)] = None
        chain = [str(step.argval)] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_names(constant)))
    return tuple(found)


@functools.cache
def _is_users_code(code: types.CodeType) -> bool:
    return is_users(code)


def _is_users(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _is_users_code(value.__code__)
