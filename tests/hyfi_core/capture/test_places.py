"""What cannot be captured is said in one line: what, in which module, in which line of the user's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 16, 16)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            return x
        return -x


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask


class Counted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.abs().max())):
            x = x + 1
        return x


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.mean().item()


class Seeded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(torch.initial_seed())
        return x * torch.rand(())


class Unfolded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x.unfold(2, 1, 2).add_(0.3)
        return x


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(3))
        self.register_buffer("last", self.means[2:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.means.lerp_(x.mean((0, 2, 3)), 0.1)
        return x - self.last


CASES = [
    (nn.Sequential(nn.Flatten(), nn.Linear(5, 2)), r"in 1 \(Linear\): .*"),
    (
        nn.Sequential(nn.Conv2d(3, 3, 1), Branch()),
        r"in 1 \(Branch\), at .*test_places.py:\d+ \(if x.mean\(\) > 0:\): it ",
    ),
    (
        nn.Sequential(nn.Conv2d(3, 3, 1), Counted()),
        r"in 1 \(Counted\), at .*int\(x.abs\(\).max\(\)\)\):\): it reads a value from a tensor",
    ),
    (nn.Sequential(nn.Conv2d(3, 3, 1), Scaled()), r"computes with it, .*test_places.py:\d+ \(return x \* x.mean"),
    (Seeded(), r"seeds torch's generator as it runs, at .*test_places.py:\d+ "),
    (Unfolded(), r"changes a view made by Tensor.unfold in place \(.*test_places.py:\d+ \(x.unfold"),
    (Overlapping(), r"'means' and 'last' are different tensors in the same memory, and the forward changes one"),
    (Masked(), r"the forward requires arguments besides the image: 'mask'"),
    (nn.Sequential(nn.Conv2d(4, 3, 1)), r"in 0 \(Conv2d\): .*channels"),
]


@pytest.mark.parametrize(("model", "words"), CASES)
def test_a_failure_is_told_in_one_line(
    model: nn.Module, words: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(RequestError, match=words) as failure:
        capture(model, SHAPE, torch.float32)
    said = str(failure.value)
    assert "\n" not in said and len(said) < 600, said
    assert capfd.readouterr() == ("", "") and not caplog.records
