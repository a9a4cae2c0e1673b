"""Roll, flip, circular padding, repeats: exact on any grid, and a roll moves no more than a halo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.ops.redistribute import Redistribute
from hyfi_core.rules.instructions import CollectiveCall
from hyfi_core.rules.moves.slices import _slices
from tests.harness import Answers, assert_answers_equal_one_process

Tensor = torch.Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda y: torch.roll(y, (1, -2), (2, 3)) * y,
    "roll far": lambda y: torch.roll(y, (-7, 3), (3, 2)),
    "roll of channels": lambda y: torch.roll(y, 1, 1) + torch.roll(y, (2, 1), (1, 3)),
    "roll in other dims": lambda y: torch.roll(y.permute(0, 2, 3, 1), shifts=(-1, -1), dims=(1, 2)),
    "flip": lambda y: y.flip(3) * y + y.flip((1, 2)) + y.flip(1),
    "circular": lambda y: F.pad(y, (1, 2, 3, 0), mode="circular"),
    "circular convolution": lambda y: F.conv2d(
        F.pad(y, (1, 1, 1, 1), mode="circular"), torch.ones(2, 6, 3, 3).double()
    ),
    "repeat": lambda y: y.repeat(1, 1, 2, 3),
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (5, 1), (2, 3)])
def test_moved_pixels_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, (2, 3, 8, 11), grid)


def test_a_circular_convolution_of_the_image_itself() -> None:
    functions = {"": nn.Conv2d(6, 2, 3, padding=1, padding_mode="circular").double().requires_grad_(False)}
    assert_answers_equal_one_process(functions, (2, 3, 8, 11), (2, 2))


def test_a_roll_receives_what_crosses_the_cuts_alone() -> None:
    program = capture(Answers({"": lambda y: torch.roll(y, (3, 3), (2, 3))}), (1, 3, 128, 128), torch.float32)
    for rank in range(4):
        ranked = lower(program, Target((2, 2), rank, gather_bytes=0))
        moves = [step.operator for step in ranked.instructions if isinstance(step, CollectiveCall)]
        received = [move.transfer.received_px for move in moves if isinstance(move, Redistribute)]
        assert sum(received[1:-1]) <= 3 * 32 * 2, "of 64 x 64 pixels; before is the halo of the stem, behind the answer"


def test_a_roll_of_the_flattened_tensor_is_refused_with_what_works() -> None:
    program = capture(Answers({"": lambda y: torch.roll(y, 5)}), (1, 3, 8, 8), torch.float32)
    with pytest.raises(RequestError, match=r"rolls the flattened tensor, .*what works: explicit dims"):
        lower(program, Target((1, 2), 0, gather_bytes=0))


@pytest.mark.parametrize(
    ("table", "runs"),
    [([], []), ([3, 4, 0, 1], [(3, 5, 1), (0, 2, 1)]), ([4, 3, 2], [(2, 5, -1)]), ([2, 2], [(2, 3, 1), (2, 3, 1)])],
)
def test_runs_of_a_table(table: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert _slices(table) == runs
