"""The tables of all stages against the stages themselves, one after the other."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.capture.stages import cut_program
from hyfi_core.cost.memory.forecast import StageMaps, forecast_memory
from hyfi_core.cost.memory.lifetimes import Peak
from hyfi_core.cost.memory.stage_table import StageTable, TablePeak
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once


class Skips(nn.Module):
    """A value that is used late, a weight that is used twice, and a module that computes nothing needed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.unused = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(2, 2)
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.first.weight
        self.gate, self.head = nn.Sigmoid(), nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.unused(images[0, 0, :2, :2])
        early = self.enter(images)
        late = self.gate(self.second(torch.relu(self.first(early)))) * early
        return self.head(late.mean((2, 3))), early.mean()


MODELS = {
    "resnet18": lambda: resnet18(2),
    "amoebanet": lambda: amoebanet_d(2, layers=3, filters=32),
    "skips": Skips,
}


@cache
def captured(name: str) -> Program:
    torch.manual_seed(0)
    return captured_once(MODELS[name]().train(), (2, 3, 64, 64), torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_tables_have_what_single_stages_have(name: str) -> None:
    program = captured(name)
    assert not StageTable.of(program).copies  # so that plans may be rated by the tables alone
    table, last = StageTable.of(program), len(StageTable.of(program).places) - 1
    pairs = list(combinations(range(last + 1), 2))
    for begin, end in pairs if len(pairs) < 500 else pairs[::397]:
        cuts = [table.names[place - 1] for place in (begin, end) if 0 < place < last]
        pieces = cut_program(program, program.outputs, cuts)
        wanted = StageMaps.of(program, pieces)[1 if begin else 0]
        for field in fields(StageMaps):
            for ranks in (1, 2, 7) if isinstance(getattr(wanted, field.name), Peak) else (1,):
                found = np.asarray(_number(getattr(table.maps, field.name), ranks))
                expected = _number(getattr(wanted, field.name), ranks)
                assert (found[begin, end] if found.ndim else found) == expected, (cuts, field.name, ranks)


def _number(value: Any, ranks: int) -> Any:
    return value.bytes(ranks) if isinstance(value, (Peak, TablePeak)) else value


def test_stages_between_cuts_are_read_from_the_tables() -> None:
    program = captured("resnet18")
    cuts = ("layer1", "layer2.0.bn1", "layer4.0")
    plan = ParallelPlan(((1, 2), (1, 1), (2, 2), (1, 1)), cuts, microbatches=4)
    table = StageTable.of(program)
    assert forecast_memory(program, plan, table.stages(cuts)) == forecast_memory(program, plan)
    whole = ParallelPlan(((1, 1),))
    assert forecast_memory(program, whole, table.stages(())) == forecast_memory(program, whole)
