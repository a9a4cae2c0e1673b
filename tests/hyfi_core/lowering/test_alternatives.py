"""What a refusal says would work does work, and gives the same where it is said to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.rules.table import OPERATORS

Function = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (2, 6, 80, 80)


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


PAIRS: dict[str, tuple[Function, Function]] = {
    "linalg_matrix_norm.str_ord": (
        lambda y: torch.linalg.matrix_norm(y, dim=(2, 3)),
        lambda y: torch.linalg.vector_norm(y, dim=(2, 3)),
    ),
    "max_pool2d_with_indices.default": (
        lambda y: F.max_pool2d(y, 2, return_indices=True)[0],
        lambda y: F.max_pool2d(y, 2),
    ),
    "grid_sampler.default": (
        lambda y: F.grid_sample(y, torch.zeros(2, 160, 160, 2), align_corners=False),
        lambda y: F.interpolate(y, scale_factor=2, mode="bilinear"),
    ),
}
OTHERWISE = {"grid_sampler.default"}


def captured(function: Function) -> Program:
    return capture(Applied(function), SHAPE, torch.float32)


INSTEAD = {text: record.instead for text, record in OPERATORS.items() if record.instead is not None}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_proposed_works(name: str) -> None:
    refused, proposed = PAIRS[name]
    program = captured(refused)
    with pytest.raises(RequestError) as said:
        lower(program, Target((1, 2), 0, gather_bytes=0))
    found = str(said.value)
    assert any(found.startswith(text) and instead in found for text, instead in INSTEAD.items()), found
    program = captured(proposed)
    lower(program, Target((1, 2), 0, gather_bytes=0))
    if name not in OTHERWISE:
        images = torch.rand(SHAPE)
        torch.testing.assert_close(proposed(images), refused(images))


def test_only_operators_without_a_rule_have_something_instead() -> None:
    assert INSTEAD
    for text in INSTEAD:
        assert OPERATORS[text].rule is None
        _, name, overload = text.split(".")
        assert str(getattr(getattr(torch.ops.aten, name), overload)) == text


class RunningByHand(nn.Module):
    """The function, not the module: its running statistics would change unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # PyTorch's operator itself: of ``F.instance_norm``, capture traces arithmetic.
        return torch.instance_norm(x, None, None, self.mean, self.variance, True, 0.1, 1e-5, False)


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        (RunningByHand(), "nn.GroupNorm"),
    ],
)
def test_rules_that_refuse_say_what_works(module: nn.Module, instead: str) -> None:
    program = captured(module)
    with pytest.raises(RequestError, match=instead):
        lower(program, Target((1, 2), 0, gather_bytes=0))
