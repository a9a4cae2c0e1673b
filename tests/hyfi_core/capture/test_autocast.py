"""The types that autocast will choose are known before anything is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.capture.autocast import dtypes_under_autocast
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program

pytestmark = pytest.mark.captures_each


class Ramp(nn.Module):
    """Ends in what GPUs compute in float32 under autocast and CPUs do not; has a constant made on its own device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x) * torch.arange(6, device=x.device).to(x.dtype)).half().exp()


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(Ramp(), (1, 3, 8, 8), torch.float32)


def made_by(program: Program, text: str) -> str:
    (name,) = [op.outputs[0] for op in program.operators if op.text.startswith(f"aten.{text}")]
    assert name is not None
    return name


def test_on_cpu_types_are_those_of_a_run(program: Program) -> None:
    found = dtypes_under_autocast(program, torch.bfloat16, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        images = torch.zeros(1, 3, 8, 8)
        conv = nn.Conv2d(3, 4, 3)(images)
        answer = Ramp()(images)
    assert found[made_by(program, "conv2d")] == conv.dtype == torch.bfloat16
    assert found[made_by(program, "exp")] == answer.dtype == torch.float16


def test_a_callers_autocast_is_not_part_of_the_program(program: Program) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = capture(Ramp(), (1, 3, 8, 8), torch.float32)
    assert [op.text for op in found.operators] == [op.text for op in program.operators]


def test_a_gpu_has_lists_of_its_own(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is computed, so no GPU is needed; PyTorch only has to be told not to turn autocast off for want of one.
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    found = dtypes_under_autocast(program, torch.float16, "cuda")
    assert found[made_by(program, "conv2d")] == torch.float16
    assert found[made_by(program, "exp")] == torch.float32


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.encoder(self.patches(x).flatten(2).transpose(1, 2))
        return tokens.mean(1)


def test_attention_may_have_other_strides_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view that follows it at capture does not exist for the strides of a GPU's kernel."""
    program = capture(Attending().eval(), (2, 3, 32, 32), torch.float32)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    found = dtypes_under_autocast(program, torch.float16, "cuda")
    assert found[made_by(program, "scaled_dot_product_attention")] == torch.float16
    assert found[made_by(program, "mean")] == torch.float32  # behind a layer norm
