"""An operator of the model as a call: on other values than it was captured with, constants bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hyfi_core.capture.program import Operator, Ref, substitute


def bound(op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return (function, inputs): the operator's call as a function of the values it takes, constants bound."""
    names = tuple(dict.fromkeys(op.inputs))

    def call(*tensors: Any) -> Any:
        values = dict(zip(names, tensors, strict=True))
        return op.target(*substitute(op.args, values), **{k: substitute(v, values) for k, v in op.kwargs.items()})

    return call, names


def renamed(op: Operator, names: dict[str, str]) -> Operator:
    """Return the operator with some of its values replaced by others."""

    def swap(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        if isinstance(argument, (list, tuple)):
            return type(argument)(swap(item) for item in argument)
        return argument

    return replace(op, args=swap(op.args), kwargs={key: swap(item) for key, item in op.kwargs.items()})
