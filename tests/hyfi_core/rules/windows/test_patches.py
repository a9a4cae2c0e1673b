"""Patches by unfold, of all settings, and added up again by fold: exact on any grid, nothing gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from tests.harness import Answers, assert_answers_equal_one_process

Tensor = torch.Tensor

STEPS: Any = {"kernel_size": (2, 3), "padding": (0, 1), "stride": (2, 1)}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "unfold": lambda y: F.unfold(y, 3, padding=1),
    "unfold and view": lambda y: F.unfold(y, 3, padding=1).view(2, 6, 9, 4, 6).softmax(2),
    "unfold with steps": lambda y: F.unfold(y, (2, 3), dilation=(1, 2), padding=(0, 2), stride=(2, 1)).mean(2),
    "fold": lambda y: F.fold(F.unfold(y, 3, padding=1).tanh(), (4, 6), 3, padding=1),
    "fold with steps": lambda y: F.fold(
        F.unfold(y, (2, 3), 1, (0, 1), (2, 1)).tanh(), (4, 6), (2, 3), 1, (0, 1), (2, 1)
    ),
    "patches": lambda y: y.unfold(2, 2, 2).unfold(3, 3, 3).permute(0, 2, 3, 1, 4, 5).flatten(3),
    "patches that overlap": lambda y: y.unfold(3, 3, 1).amax(4) + y.unfold(1, 2, 2).sum((1, 4)).mean(),
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (5, 1), (2, 3)])
def test_patches_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, (2, 3, 8, 11), grid)


def test_a_fold_of_other_positions_is_refused() -> None:
    def function(y: Tensor) -> Tensor:
        return F.fold(F.unfold(y, 2), (7, 2), 2)

    program = capture(Answers({"": function}), (2, 3, 6, 8), torch.float32)
    with pytest.raises(RequestError, match=r"col2im.*folds a map of \(2, 3\) positions"):
        lower(program, Target((2, 2), 0, gather_bytes=0))
