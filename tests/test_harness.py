"""What the tests share saves their time: each model is captured once."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hyfi_core
from tests import harness
from tests.harness import captured_once, run_copies

SHAPE = (1, 3, 8, 8)


def _model(stride: int = 1) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, stride), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(*layers)


@pytest.fixture(autouse=True)
def _captures(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    captures = mock.Mock(side_effect=harness.capture)
    monkeypatch.setattr(harness, "capture", captures)
    monkeypatch.setattr(harness, "_PROGRAMS", {})
    return captures


def test_all_ranks_and_later_engines_share_one_capture(_captures: mock.Mock) -> None:
    """Each engine adds hooks to its module, under numbers that no other module of the process has."""
    plan = hyfi_core.ParallelPlan(((1, 1),) * 2, ("1",))

    def body(comm: Any, module: nn.Module) -> None:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm)
        engine.accumulate(torch.zeros(SHAPE), torch.zeros(1, dtype=torch.long))

    for _ in range(2):
        run_copies(_model(), 2, body)
    assert _captures.call_count == 1


def _hooked() -> nn.Module:
    model = _model()
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


def _eval() -> nn.Module:
    return _model().eval()


def _numbered(number: int) -> nn.Module:
    model = _model()
    model.table = {number: 1}  # type: ignore[assignment]
    return model


def test_other_models_are_captured_by_themselves(_captures: mock.Mock) -> None:
    models = [_model(), _model(2), _hooked(), _eval(), _numbered(1), _numbered(2)]
    for model in models:
        captured_once(model, SHAPE, torch.float32)
    assert _captures.call_count == len(models)


def test_captures_in_tests_write_no_trace() -> None:
    """With one handler, captures took a fifth more time, with those of pytest and their records more than that."""
    trace = logging.getLogger("torch.__trace")
    assert trace.name == torch._logging._internal.trace_log.name and not trace.handlers
