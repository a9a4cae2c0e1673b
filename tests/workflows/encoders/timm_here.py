"""timm for tests, also where its torchvision is missing or is of another build of PyTorch, as with wheels for the CPU.

Encoders use nothing of torchvision: a stand-in for its modules is enough to import timm.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch


class StandIn:
    """Finds every module of torchvision: a mock."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: Any) -> None:
        module.FrozenBatchNorm2d = type("FrozenBatchNorm2d", (torch.nn.Module,), {})


@contextmanager
def timm_or_skip() -> Iterator[ModuleType]:
    """Context in which timm can be imported, and is; skip where it is not installed.

    With a stand-in for torchvision, timm is forgotten at the end: other tests ask whether it can be imported.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        stand_in = StandIn()
        _forget("torchvision", "timm")
        sys.meta_path.insert(0, stand_in)  # type: ignore[arg-type]
        try:
            timm = pytest.importorskip("timm")
        finally:
            sys.meta_path.remove(stand_in)  # type: ignore[arg-type]
            _forget("torchvision")
        yield timm
        _forget("timm")
    else:
        yield pytest.importorskip("timm")


def _forget(*packages: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
