"""timm for tests, also where its torchvision is missing or is of another build of PyTorch, as with wheels for the CPU.

Encoders use nothing of torchvision: a stand-in for its modules is enough to import timm.
"""

from __future__ import annotations

import importlib.machinery
import sys
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


def timm_or_skip() -> ModuleType:
    """Return timm; skip where it is not installed."""
    if "timm" not in sys.modules:
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError):
            _import_with_stand_in()
    return pytest.importorskip("timm")


def _import_with_stand_in() -> None:
    stand_in = StandIn()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.meta_path.insert(0, stand_in)  # type: ignore[arg-type]
    try:
        __import__("timm")
    except ModuleNotFoundError:
        pass
    finally:
        sys.meta_path.remove(stand_in)  # type: ignore[arg-type]
        # Others, such as transformers, ask whether there is a torchvision.
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
