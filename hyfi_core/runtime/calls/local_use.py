"""Uses of the user's module that see one rank only: in a pipeline, a rank trains the weights of its own stages.

::

    rank 0    stage 0   trained      stage 1   as they were at the start      model(x), model.state_dict(): neither
    rank 1    stage 0   as they were at the start      stage 1   trained      the start nor the trained model

Hooks of the module refuse its forward and warn of its ``state_dict``, and name the engine's method; ``parallelize``
refuses it for a second engine. They say nothing before a step has been trained or once the whole state is loaded, and
while the engine itself reads it. A copy of the module, also one in a file, has the hooks and what they know.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hyfi_core.errors import RequestError

_OWN_USE: ContextVar[bool] = ContextVar("own_use", default=False)


class LocalUse:
    """The hooks of one module of several stages, and of no other: a copy of the module gets a copy."""

    # No attributes: a capture is used again for a module in the same state, to which attributes of hooks belong.
    __slots__ = ("__weakref__",)

    def __repr__(self) -> str:
        return "LocalUse()"  # no address: those of a copy are the same

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_weight, (_STALE.get(self),)

    def refuse_forward(self, module: nn.Module, images: Any) -> None:
        """Refuse the forward of a module that has old weights; a capture calls the hooks, too."""
        name = None if torch.compiler.is_exporting() or _OWN_USE.get() else _STALE.get(self)
        if name is not None:
            raise RequestError(f"{_stale_sentence(module, name, 'its forward')}; call engine.predict(images)")

    def warn_of_state(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Warn once of a module's ``state_dict`` if other ranks train some of its weights."""
        name = None if _OWN_USE.get() or self in _WARNED else _STALE.get(self)
        if name is not None:
            _WARNED.add(self)
            sentence = _stale_sentence(module, name, "its state_dict")
            warnings.warn(f"{sentence}; call engine.gather_state_dict(), or engine.save(folder)", stacklevel=4)

    def note_loaded(self, module: nn.Module, incompatible: Any) -> None:
        """Note that a module's weights were loaded, all of them."""
        if not incompatible.missing_keys:
            mark_stale(module, None)


_STALE: weakref.WeakKeyDictionary[LocalUse, str] = weakref.WeakKeyDictionary()
"""Hooks of a module -> a weight of it that only other ranks train."""
_WARNED: weakref.WeakSet[LocalUse] = weakref.WeakSet()


def watch_local_use(model: nn.Module, stages: int) -> None:
    """Add the hooks to a module of several stages; call it before a capture: hooks are part of the module's state."""
    if stages > 1 and _hooks_of(model) is None:
        hooks = LocalUse()
        model.register_forward_pre_hook(hooks.refuse_forward)
        model.register_state_dict_pre_hook(hooks.warn_of_state)
        model.register_load_state_dict_post_hook(hooks.note_loaded)


def mark_stale(model: nn.Module, name: str | None) -> None:
    """Refuse and warn of local use from now on.

    Args:
        model: a module; nothing is done without the hooks of ``watch_local_use``.
        name: a weight that only other ranks train; None: all are up to date.
    """
    if (hooks := _hooks_of(model)) is None:
        return
    if name is None:
        _STALE.pop(hooks, None)
    else:
        _STALE[hooks] = name


def refuse_stale(model: nn.Module) -> None:
    """Refuse a module for a new engine if only other ranks have trained some of its weights.

    Raises:
        RequestError: the new engine would send the values of rank 0 to all ranks, and undo what they have trained.
    """
    hooks = _hooks_of(model)
    if hooks is not None and (name := _STALE.get(hooks)) is not None:
        raise RequestError(
            f"{_stale_sentence(model, name, 'a second engine')}; first load what engine.gather_state_dict() returned "
            f"into the module on every rank"
        )


@contextmanager
def own_use() -> Iterator[None]:
    """Context in which the engine itself uses a module on this thread: the hooks neither refuse nor warn."""
    token = _OWN_USE.set(True)
    try:
        yield
    finally:
        _OWN_USE.reset(token)


def local_state(model: nn.Module) -> dict[str, Any]:
    """Return the module's ``state_dict`` on this rank; weights that other ranks train may have old values."""
    with own_use():
        return model.state_dict()


def _hooks_of(model: nn.Module) -> LocalUse | None:
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, LocalUse)), None)


def _with_weight(name: str | None) -> LocalUse:
    """Return the hooks of a copy, made while a weight of the module was known to be old."""
    hooks = LocalUse()
    if name is not None:
        _STALE[hooks] = name
    return hooks


def _stale_sentence(module: nn.Module, name: str, subject: str) -> str:
    return (
        f"{type(module).__name__} is trained in stages, and this rank has trained weights of its own stages only: "
        f"{subject} has {name!r} as it was before training"
    )
