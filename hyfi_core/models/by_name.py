"""Construction of models by name: a built-in network, or ``package.module:factory`` of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.construct import call_of, construct

_RESNETS = ("resnet6", "resnet10", "resnet18", "resnet34", "resnet50", "resnet_v1", "resnet_v2")
BUILT_IN = {name: f"hyfi_core.models.resnet:{name}" for name in _RESNETS} | {
    "amoebanet_d": "hyfi_core.models.amoebanet:amoebanet_d"
}
"""Factory of each built-in model, as ``module:function``."""
_DEFAULTS = {"norm": "train", "pool": "avg"}


def is_built_in(name: str) -> bool:
    """Whether a model's name is one of this package's networks, not a factory of the user."""
    return ":" not in name


def build_model(model: Mapping[str, Any]) -> nn.Module:
    """Build the module that the ``model`` of a ``model.json`` describes.

    Args:
        model: ``name``, ``classes`` (their number), ``norm``, ``pool``, ``options`` (keyword arguments). A user's
            factory is called with ``classes=…``, with ``norm`` and ``pool`` if it has these parameters (if it has
            ``**kwargs`` instead, only with values that are not the defaults), and with the options.

    Raises:
        RequestError: There is no such model, or it does not accept these arguments.
    """
    module = construct("model", **_factory_call(model)._asdict())
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise RequestError(
            f"model {model['name']} returned a program of TorchScript, which cannot be captured; return the module "
            f"from which it was made, with the weights of its state_dict()"
        )
    return module


def call_of_model(model: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return ``module:function`` of a model's factory and the keyword arguments with which `build_model` calls it.

    Raises:
        RequestError: As `build_model`.
    """
    call = _factory_call(model)
    _, arguments = call_of("model", **call._asdict())  # (the factory, its arguments)
    return call.path, arguments


def unused_keys(model: Mapping[str, Any]) -> list[str]:
    """Return which of ``norm`` and ``pool`` are not the defaults, but are no parameters of the model's factory."""
    call = _factory_call(model)
    _, arguments = call_of("model", **call._asdict())
    return [key for key, value in call.accepted_only.items() if value != _DEFAULTS[key] and key not in arguments]


class _FactoryCall(NamedTuple):
    """The arguments of `construct` for a model; each field is the parameter of that name."""

    name: str
    path: str
    needed: dict[str, Any]
    options: dict[str, Any]
    accepted_only: dict[str, Any]
    defaults: Mapping[str, Any]


def _factory_call(model: Mapping[str, Any]) -> _FactoryCall:
    """Return the call that a run's section ``model`` describes; refuse unknown names."""
    name = str(model["name"])
    if is_built_in(name) and name not in BUILT_IN:
        names = ", ".join(BUILT_IN)
        raise RequestError(f"model.name: given {name!r}; allowed: {names}, or package.module:factory of your own")
    return _FactoryCall(
        name,
        path=BUILT_IN.get(name, name),
        needed={"classes": int(model["classes"])},
        options=dict(model.get("options") or {}),
        accepted_only={key: model.get(key, default) for key, default in _DEFAULTS.items()},
        defaults=_DEFAULTS,
    )
