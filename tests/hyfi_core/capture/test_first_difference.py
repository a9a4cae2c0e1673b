"""Values of a module and of its program are compared up to a tolerance; NaN equals NaN, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.first_difference import equal, first_module

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("module", "program", "words"),
    [
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, INF], [1.0, INF], None),
        ([1.0, 2.0], [NAN, 2.0], "NaN at other places"),
        ([NAN, 2.0], [1.0, 2.0], "NaN at other places"),
        ([1.0, 2.0], [INF, 2.0], "infinite at other places"),
        ([INF, 2.0], [-INF, 2.0], "infinite at other places"),
        ([INF, 2.0], [INF, 2.1], "relative error"),
        ([1.0 + 2.0j], [1.0 + 3.0j], "relative error"),
        ([1.0, 2.0], [1.0, 2.1], "relative error"),
    ],
)
def test_what_is_no_number_equals_only_itself(
    module: list[float | complex], program: list[float | complex], words: str | None
) -> None:
    difference = equal({"output 0": torch.tensor(module)}, {"output 0": torch.tensor(program)}, 1e-4)
    assert (difference is None) if words is None else (difference is not None and words in difference)


def test_no_gradient_equals_one_of_zeros() -> None:
    some, none, infinite = torch.ones(2), torch.zeros(2), torch.full((2,), INF)
    assert equal({"gradient of a": None}, {"gradient of a": none}, 1e-4) is None
    assert equal({"gradient of a": None}, {"gradient of a": infinite}, 1e-4) is not None
    assert equal({"gradient of a": some}, {}, 1e-4) == "gradient of a is a tensor in the module and None in the program"


class _Offset(nn.Module):
    """Computes what its attribute says at the time."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 + self.offset


def test_a_module_with_other_nan_is_named() -> None:
    model, image = nn.Sequential(nn.Conv2d(3, 4, 1), _Offset()), torch.ones(1, 3, 4, 4)
    program = capture(model, image.shape, image.dtype)
    assert first_module(model, program, image) == ""
    model[1].offset = NAN
    assert "the first module that differs is 1 " in first_module(model, program, image)
