"""Answers of models: objects that hold tensors in attributes, taken apart and put together."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree


def make_known(answer: Any) -> None:
    """Let PyTorch take objects of this answer's class apart, if it does not know how."""
    kind = type(answer)
    plain = _pytree.SUPPORTED_NODES.get(kind) is None and not isinstance(answer, (torch.Tensor, tuple, list, dict))
    if answer is None or not plain or not (dataclasses.is_dataclass(answer) or hasattr(answer, "__dict__")):
        return
    _pytree.register_pytree_node(kind, _attributes, lambda values, names: _put_together(kind, values, names))


def _attributes(answer: Any) -> tuple[list[Any], tuple[str, ...]]:
    fields = dataclasses.fields(answer) if dataclasses.is_dataclass(answer) else ()
    names = tuple(field.name for field in fields) or tuple(vars(answer))
    return [getattr(answer, name) for name in names], names


def _put_together(kind: type, values: Any, names: Any) -> Any:
    answer: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(answer, name, value)  # frozen dataclasses, too
    return answer
