"""A call of a function that makes a module, with the arguments that it accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.user_code import load_user_code


def construct(
    key: str,
    name: str,
    path: str,
    needed: Mapping[str, Any],
    options: Mapping[str, Any],
    accepted_only: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Call a factory and return its module.

    Args:
        key: The section of the configuration with ``name`` and ``options``, for messages: ``model``.
        name: The factory's name in the configuration, for messages.
        path: ``module:function``.
        needed: Arguments that every factory is called with.
        options: Arguments of the user.
        accepted_only: Arguments that are passed only if the factory has parameters of these names.
        defaults: Values of ``accepted_only`` that are not passed to a factory that takes them as ``**kwargs``.

    Raises:
        RequestError: There is no such function, it does not accept these arguments, it cannot read a file or reach a
            server, or it returns no module.
    """
    factory, arguments = call_of(key, name, path, needed, options, accepted_only, defaults)
    try:
        module = factory(**arguments)
    except TypeError as error:
        # Networks of libraries call it num_classes.
        unknown = any(f"unexpected keyword argument '{argument}'" in str(error) for argument in needed)
        advice = f"; name a function of your own that takes {' and '.join(needed)} and calls it" if unknown else ""
        raise RequestError(f"{key} {name} cannot be built from {arguments}: {error}{advice}") from error
    except OSError as error:
        # As on the machine where a checkpoint is used: weights are no longer there, or there is no network.
        raise RequestError(
            f"{key} {name}: the factory cannot read a file, or reach a server: {type(error).__name__}: "
            f"{' '.join(str(error).split())}. Checkpoints have all weights, so a factory need not load any: give "
            f"hyfi the file of pretrained weights (model.weights of a run, --weights of an encoder)"
        ) from error
    if not isinstance(module, nn.Module):
        raise RequestError(f"{key} {name} returned {type(module).__name__}, not a torch.nn.Module")
    return module


def call_of(
    key: str,
    name: str,
    path: str,
    needed: Mapping[str, Any],
    options: Mapping[str, Any],
    accepted_only: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the factory and the keyword arguments with which `construct` calls it.

    Raises:
        RequestError: There is no such function, or it does not accept the options.
    """
    factory = load_user_code(f"{key}.name", path, f"a function that makes a {key.rpartition('.')[2]}")
    named, takes_any = _parameters(factory)
    arguments = dict(needed)
    for argument, value in (accepted_only or {}).items():
        # Most factories with **kwargs pass them to a network that does not have our keys as parameters.
        if argument in named or (takes_any and value != (defaults or {}).get(argument)):
            arguments[argument] = value
    wrong = [] if takes_any else sorted(set(options) - named)
    if wrong:
        raise RequestError(f"{key}.options.{wrong[0]}: {name} does not take it; it takes {', '.join(sorted(named))}")
    return factory, arguments | dict(options)


def _parameters(factory: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of a factory's parameters, and whether it takes others, too (``**kwargs``)."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name for p in parameters}, any(p.kind is p.VAR_KEYWORD for p in parameters)
