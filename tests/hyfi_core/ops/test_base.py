"""What operators need to know of tensors."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import torch

from hyfi_core import ops
from hyfi_core.ops.base import is_expanded


def test_only_elements_that_share_memory_make_a_tensor_expanded() -> None:
    assert is_expanded(torch.zeros(1, 3).expand(2, 3))
    assert not is_expanded(torch.zeros(2, 3)) and not is_expanded(torch.zeros(0, 3))
    assert not is_expanded(torch.zeros(3).as_strided((1, 3), (0, 1))), "one row shares nothing, whatever its stride"


def test_nothing_is_overwritten_unless_asked() -> None:
    asked = {}
    for found in pkgutil.walk_packages(ops.__path__, "hyfi_core.ops."):
        for name, kind in vars(importlib.import_module(found.name)).items():
            if dataclasses.is_dataclass(kind):
                fields = [field for field in dataclasses.fields(kind) if field.name.startswith("overwrites")]
                asked |= {f"{name}.{field.name}": field.default for field in fields}
    assert len(asked) >= 5
    assert all(default in (False, dataclasses.MISSING) for default in asked.values()), asked


def test_operators_with_cotangents_in_new_memory_say_so() -> None:
    """Whoever does not say so has them copied, where they could be overwritten."""
    say_so = set()
    for found in pkgutil.walk_packages(ops.__path__, "hyfi_core.ops."):
        module = importlib.import_module(found.name)
        kinds = [
            kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
        ]
        say_so |= {kind.__name__ for kind in kinds if vars(kind).get("own_cotangents") is True}
    assert say_so == {
        *("AvgPool", "BatchNorm", "Convolution", "FirstMaximum", "MaxOverSpace", "MaxPool", "PlaneExchange"),
        *("Relu", "SumOverRanks", "WholeMaxPool"),
    }
