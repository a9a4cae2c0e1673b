"""Overwriting: where an operand may be written over it is, and nowhere else; the numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.graph.capture import capture
from hyfi_core.graph.instructions import Compute, RankProgram
from hyfi_core.graph.lowering import Lowering
from hyfi_core.graph.rules import RULES
from tests.harness import assert_equal_to_one_process


class Block(nn.Module):
    """Norms, sums and activations, some of whose operands others still need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        a = torch.relu(x)  # x is needed once more: not over it
        b = torch.relu(self.last(self.second(a)) + x)  # over the norm's result, twice
        c = torch.sigmoid(b)
        return self.fc((torch.relu(c) + torch.exp(b)).mean((2, 3)))  # sigmoid and exp save their results: not over them


def lowered(model: nn.Module, grid: tuple[int, int]) -> RankProgram:
    program = capture(model, (1, 3, 24, 24), torch.float32)
    return Lowering(program, grid, 0, RULES).run(program.outputs)


def written_over(ranked: RankProgram, text: str) -> list[bool]:
    computes = [i for i in ranked.instructions if isinstance(i, Compute) and i.operator is not None]
    plain: list[Any] = [i for i in computes if i.operator is not None and i.operator.text == text]
    return [i.function is torch.relu_ or "_sum_over" in i.function.__qualname__ for i in plain]


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_only_what_nobody_needs_is_written_over(grid: tuple[int, int], training: bool) -> None:
    ranked = lowered(Block().train(training), grid)
    assert written_over(ranked, "aten.relu.default") == [False, True, False]
    assert written_over(ranked, "aten.add.Tensor")[-2:] == [True, False]


def test_what_leaves_the_program_is_not_written_over() -> None:
    program = capture(Block(), (1, 3, 24, 24), torch.float32)
    last = next(op for op in program.operators if op.text == "aten.add.Tensor" and op.args[1] != 1)
    normed = last.args[0].name
    ranked = Lowering(program, (1, 2), 0, RULES).run(program.outputs, exits=(normed,))
    assert written_over(ranked, "aten.add.Tensor")[-2:] == [False, False]


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_the_numbers_stay_the_same(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(Block(), (2, 3, 24, 20), grid)
