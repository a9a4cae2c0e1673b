"""Settings of a run that decide how GPUs compute."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from hyfi_core.arithmetic import set_arithmetic


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before[:3]
    torch.use_deterministic_algorithms(before[3])


def test_float32_is_float32_unless_tf32_is_asked_for() -> None:
    set_arithmetic(tf32=False, deterministic=False)
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    set_arithmetic(tf32=True, deterministic=False)
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32


def test_deterministic_runs_repeat_their_results() -> None:
    torch.backends.cudnn.benchmark = True
    set_arithmetic(tf32=False, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
