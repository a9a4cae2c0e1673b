"""Uses of the user's module that see one rank only: in a pipeline, a rank trains the weights of its own stages.

::

    rank 0    stage 0   trained      stage 1   as they were at the start      model(x), model.state_dict(): neither
    rank 1    stage 0   as they were at the start      stage 1   trained      the start nor the trained model

Hooks of the module refuse its forward and warn of its ``state_dict``, and name the engine's method; ``parallelize``
refuses it for a second engine. They say nothing before a step has been trained or once the whole state is loaded, on
copies of the module, and while the engine itself reads it.
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

_STALE: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""Module -> a weight of it that only other ranks train."""
_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_OWN_USE: ContextVar[bool] = ContextVar("own_use", default=False)


def watch_local_use(model: nn.Module, stages: int) -> None:
    """Add the hooks to a module of several stages; call it before a capture: hooks are part of the module's state."""
    if stages > 1 and _refuse_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_forward)
        model.register_state_dict_pre_hook(_warn_of_state)
        model.register_load_state_dict_post_hook(_note_loaded)


def mark_stale(model: nn.Module, name: str | None) -> None:
    """Refuse and warn of local use from now on.

    Args:
        model: the module that gets the hooks.
        name: a weight that only other ranks train; None: all are up to date.
    """
    if name is None:
        _STALE.pop(model, None)
    else:
        _STALE[model] = name


def refuse_stale(model: nn.Module) -> None:
    """Refuse a module for a new engine if only other ranks have trained some of its weights.

    Raises:
        RequestError: the new engine would send the values of rank 0 to all ranks, and undo what they have trained.
    """
    if (name := _STALE.get(model)) is not None:
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


def _refuse_forward(module: nn.Module, images: Any) -> None:
    # A capture calls the module's hooks, too.
    name = None if torch.compiler.is_exporting() or _OWN_USE.get() else _STALE.get(module)
    if name is not None:
        raise RequestError(f"{_stale_sentence(module, name, 'its forward')}; call engine.predict(images)")


def _warn_of_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Warn once of a module's ``state_dict`` if other ranks train some of its weights."""
    name = None if _OWN_USE.get() or module in _WARNED else _STALE.get(module)
    if name is not None:
        _WARNED.add(module)
        sentence = _stale_sentence(module, name, "its state_dict")
        warnings.warn(f"{sentence}; call engine.gather_state_dict(), or engine.save(folder)", stacklevel=4)


def _note_loaded(module: nn.Module, incompatible: Any) -> None:
    """Note that a module's weights were loaded, all of them."""
    if not incompatible.missing_keys:
        mark_stale(module, None)


def _stale_sentence(module: nn.Module, name: str, subject: str) -> str:
    return (
        f"{type(module).__name__} is trained in stages, and this rank has trained weights of its own stages only: "
        f"{subject} has {name!r} as it was before training"
    )
