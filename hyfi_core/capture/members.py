"""Members of the user's classes, modules and objects, looked up without running code of theirs.

``getattr`` would call a property or ``__getattr__``, which may raise or compute for long.
"""

from __future__ import annotations

import enum
import functools
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.places import is_users

VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device),
    *(list, tuple, dict, set, frozenset),
)
"""Types whose values count as a whole: none of their attributes is looked up."""
_IDENTITIES = (types.FunctionType, types.BuiltinFunctionType)
_WRAPPERS = {
    staticmethod: "__func__",
    classmethod: "__func__",
    types.MethodType: "__func__",
    property: "fget",
    functools.cached_property: "func",
}
_NOTHING = object()
"""Stands for an attribute that is not there."""


class KnownClass:
    """What a class held when it was last read; kept alive, so that no address is used again.

    Args:
        holder: the class; its bases have entries of their own.

    Attributes:
        methods: (name, function) of the user's functions in it, unwrapped.
        values: (name, value) of ``VALUES``, except those named ``__…``.
        objects: (name, value) of others, except functions and methods.
    """

    def __init__(self, holder: type) -> None:
        # A change of the class is noticed by the names, ids and codes; the items are kept alive for their ids.
        self._held = vars(holder)
        self._items, self._names = [*self._held.values()], [*self._held]
        self._ids = [*map(id, self._items)]
        # Functions, also those of properties and static methods.
        functions = {name: unwrapped(value) for name, value in self._held.items()}
        functions = {name: value for name, value in functions.items() if isinstance(value, types.FunctionType)}
        self._functions, self._codes = [*functions.values()], [f.__code__ for f in functions.values()]
        self.methods = [(name, function) for name, function in functions.items() if is_users_function(function)]
        # Plain values (numbers, texts, containers), then all other objects.
        self.values = [(n, v) for n, v in self._held.items() if isinstance(v, VALUES) and not n.startswith("__")]
        others = [(n, v) for n, v in self._held.items() if not isinstance(v, (*VALUES, types.FunctionType))]
        self.objects = [(n, v) for n, v in others if type(v) not in _WRAPPERS and not n.startswith("__")]

    def is_same(self) -> bool:
        """Whether it holds the same objects under the same names, and its functions the same code."""
        return (
            [*map(id, self._held.values())] == self._ids
            and [*self._held] == self._names
            and [function.__code__ for function in self._functions] == self._codes
        )


_CLASSES: dict[type, KnownClass] = {}


def known_class(holder: type) -> KnownClass:
    """Return what a class holds now; read again only after a change."""
    known = _CLASSES.get(holder)
    if known is None or not known.is_same():
        known = _CLASSES[holder] = KnownClass(holder)
    return known


def looked_up(names: Mapping[str, Any], chain: tuple[str, ...]) -> tuple[str, Any]:
    """Return (name, value) of a chain ``name.attribute.attribute``, followed as far as no code has to run.

    Args:
        names: globals of a function.
        chain: the name of a global, then those of attributes: ``("config", "model", "scale")``.
    """
    value = names.get(chain[0], _NOTHING)
    for number, name in enumerate(chain[1:], 1):
        attribute_value = _NOTHING
        # Values of these types count as a whole: their attributes are methods, or computed.
        if value is not os.environ and not isinstance(value, (*VALUES, types.FunctionType, torch.Tensor, nn.Module)):
            attribute_value = _attribute(value, name)
        # Functions of PyTorch, such as ``F.relu``, do not count: a trace in another thread may replace them.
        if isinstance(value, (types.ModuleType, type)) and _is_replaceable(attribute_value):
            attribute_value = _NOTHING
        if attribute_value is _NOTHING:
            return ".".join(chain[:number]), value
        value = attribute_value
    return ".".join(chain), value


def holders(names: Mapping[str, Any], chain: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """Yield (class or dict that holds it, its name) of each attribute in a chain ``name.attribute.attribute``.

    Args:
        names: globals of a function.
        chain: the name of a global, then those of attributes: ``("config", "model", "scale")``.
    """
    value = names.get(chain[0], _NOTHING)
    for name in chain[1:]:
        owner = value if isinstance(value, type) else dict_of(value)
        if name not in (vars(owner) if isinstance(owner, type) else owner):
            return
        yield owner, name
        value = _attribute(value, name)


def unwrapped(value: Any) -> Any:
    """Return the function of a method, a property or a static method; other values unchanged."""
    kind = type(value)
    return getattr(value, _WRAPPERS[kind]) if kind in _WRAPPERS else value


def dict_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes that an object holds; empty if it has no ``__dict__``."""
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def is_users_function(value: Any) -> bool:
    """Whether a value is a function in Python that is not PyTorch's, Python's or the engine's; see ``is_users``."""
    return isinstance(value, types.FunctionType) and _is_users_code(value.__code__)


@functools.cache
def _is_users_code(code: types.CodeType) -> bool:
    return is_users(code)


def _is_replaceable(value: Any) -> bool:
    """Whether this is a function of PyTorch, which a trace in another thread may replace in its module or class."""
    return isinstance(value, _IDENTITIES) and value is not os.getenv and not is_users_function(value)


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute from the dicts of an object, a module or a class with its bases; ``_NOTHING`` without it."""
    kinds = holder.__mro__ if isinstance(holder, type) else ()
    for members in (dict_of(holder), *(vars(kind) for kind in kinds)):
        if name in members:
            return unwrapped(members[name]) if kinds else members[name]
    return _NOTHING
