"""Construction of models by name: a built-in network, or ``package.module:factory`` of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.user_code import load_user_code

_RESNETS = ("resnet6", "resnet10", "resnet18", "resnet34", "resnet50", "resnet_v1", "resnet_v2")
BUILT_IN = {name: f"hyfi_core.models.resnet:{name}" for name in _RESNETS} | {
    "amoebanet_d": "hyfi_core.models.amoebanet:amoebanet_d"
}
"""Factory of each built-in model, as ``module:function``."""


def is_built_in(name: str) -> bool:
    """Whether a model's name is one of this package's networks, not a factory of the user."""
    return ":" not in name


def build_model(model: Mapping[str, Any]) -> nn.Module:
    """Build the module that the ``model`` of a ``model.json`` describes.

    Args:
        model: ``name``, ``classes`` (their number), ``norm``, ``pool``, ``options`` (keyword arguments). A user's
            factory is called with ``classes=…``, with ``norm`` and ``pool`` if it has these parameters, and with the
            options.

    Raises:
        RequestError: There is no such model, or it does not accept these arguments.
    """
    name, options = str(model["name"]), dict(model.get("options") or {})
    factory = _factory(name)
    accepted = _parameters(factory)
    arguments = {"classes": int(model["classes"])}
    for key in ("norm", "pool"):
        if accepted is None or key in accepted:
            arguments[key] = model.get(key, {"norm": "train", "pool": "avg"}[key])
    wrong = [] if accepted is None else sorted(set(options) - accepted)
    if wrong:
        raise RequestError(
            f"model.options.{wrong[0]}: {name} does not take it; it takes {', '.join(sorted(accepted or ()))}"
        )
    try:
        module = factory(**{**arguments, **options})
    except TypeError as error:
        raise RequestError(f"model {name} cannot be built from { ({**arguments, **options}) }: {error}") from error
    if not isinstance(module, nn.Module):
        raise RequestError(f"model {name} returned {type(module).__name__}, not a torch.nn.Module")
    return module


def _factory(name: str) -> Callable[..., Any]:
    module_name, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not colon:
        known = ", ".join(BUILT_IN)
        raise RequestError(f"model.name: given {name!r}; allowed: {known}, or package.module:factory of your own")
    return load_user_code("model.name", f"{module_name}:{attribute}", "a function that makes a model")


def _parameters(factory: Callable[..., Any]) -> set[str] | None:
    """Return the parameter names of ``factory``, None if it takes any."""
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters}
