"""Costs of cells: the quick ways give what the long ones do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from hyfi_core.capture.program import Program
from hyfi_core.cells import budget, fused_memory
from hyfi_core.cells.budget import SIDES, evaluation_bytes, with_cells
from hyfi_core.cells.fused_memory import CellCosts, runs_for_cells
from hyfi_core.cost.memory.forecast import RECORD_BYTES, forecast_memory
from hyfi_core.errors import MemoryLimitError
from hyfi_core.models.resnet import resnet6
from hyfi_core.plan.box import hull
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once


def program() -> Program:
    torch.manual_seed(0)
    return captured_once(resnet6(2, width=8).eval(), (1, 3, 1024, 1024), torch.float32)


def test_one_operator_reads_what_the_hulls_of_all_cells_are() -> None:
    intervals = ((0, 5), (5, 9)), ((0, 7), (4, 13), (13, 13)), ((3, 3),), ((-1, 4), (2, 9), (8, 11))
    for rows, columns, turned in product(intervals, intervals, (False, True)):
        boxes = Boxes(rows, columns, turned)
        assert fused_memory._largest_read([boxes]) == max(hull([box]).area for box in boxes)
        assert fused_memory._largest_read([boxes]) == fused_memory._largest_read([boxes, boxes])


def test_costs_are_computed_once_for_each_grid() -> None:
    costs = CellCosts(program())
    with mock.patch.object(fused_memory, "runs_for_cells", wraps=runs_for_cells) as chosen:
        for grid in ((1, 1), (2, 2), (4, 4), (2, 2)):
            assert costs.of(grid) == runs_for_cells(program(), grid)[1]
        for cells in ((2, 2), (4, 4)):
            assert evaluation_bytes(costs, (1, 1), cells, 0) == evaluation_bytes(CellCosts(program()), (1, 1), cells, 0)
    assert [call.args[1] for call in chosen.call_args_list] == [(1, 1), (2, 2), (4, 4), (2, 2), (4, 4)]


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_cells_are_those_that_a_look_at_all_numbers_of_cells_chooses(grid: tuple[int, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(budget, "LIBRARY_BYTES", 0)
    costs, (weights,) = CellCosts(program()), forecast_memory(program(), ParallelPlan((grid,)))
    records = len(program().operators) * RECORD_BYTES[False]
    every = {}
    for side in SIDES[1:]:
        step = int(costs.of((grid[0] * side, grid[1] * side)).step_bytes)
        every[side] = budget._of_cells(0, side, step, weights.largest_weight_bytes, records)
    seen = set()
    for memory_bytes in range(200_000, 24_000_000, 600_000):
        rooms = [
            side for room in (2, 1) for side, (held, least) in every.items() if _fits(held, least, room, memory_bytes)
        ]
        plan = ParallelPlan((grid,), cells="auto", spill="memory", memory_bytes=memory_bytes)
        try:
            found = with_cells(plan, program(), 0, torch.device("cpu"), trains=False)
        except MemoryLimitError as refused:
            assert rooms == [] and refused.least_bytes == min(least for _, least in every.values())
            continue
        assert found == with_cells(plan, program(), 0, torch.device("cpu"), False, costs)
        if found.cells is not None:
            assert found == replace(plan, cells=(rooms[0], rooms[0]))
        seen.add(found.cells)
    assert len(seen) > 2


def _fits(held: int, least: int, room: int, memory_bytes: int) -> bool:
    return held + room * (least - held) <= memory_bytes
