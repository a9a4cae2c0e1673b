"""Construction of models by name: a built-in network, or ``package.module:factory`` of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.construct import call_of, construct

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
    name, path, *arguments = _described(model)
    return construct("model", name, path, *arguments)


def call_of_model(model: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return ``module:function`` of a model's factory and the keyword arguments with which `build_model` calls it.

    Raises:
        RequestError: As `build_model`.
    """
    name, path, *arguments = _described(model)
    return path, call_of("model", name, path, *arguments)[1]


def _described(model: Mapping[str, Any]) -> tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return (name, ``module:function``, needed arguments, options, arguments that it may have) of a model."""
    name, options = str(model["name"]), dict(model.get("options") or {})
    if is_built_in(name) and name not in BUILT_IN:
        known = ", ".join(BUILT_IN)
        raise RequestError(f"model.name: given {name!r}; allowed: {known}, or package.module:factory of your own")
    usual = {"norm": model.get("norm", "train"), "pool": model.get("pool", "avg")}
    return name, BUILT_IN.get(name, name), {"classes": int(model["classes"])}, options, usual
