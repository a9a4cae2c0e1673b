"""Packing of parallel branches: what stays together, what is balanced, what is computed everywhere."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.branch_packing import pack_branches
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.cost.operators import operator_costs
from hyfi_core.models.resnet import resnet10
from hyfi_core.plan.branches import Branches


class Fan(nn.Module):
    """Branches of convolutions with kernels of these sizes, between a stem and a sum."""

    def __init__(self, *kernels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, k, padding=k // 2), nn.ReLU(), nn.Conv2d(8, 8, k, padding=k // 2))
            for k in kernels
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return torch.cat([branch(x) for branch in self.branches], 1)


def _program(model: nn.Module, size: int = 64) -> Program:
    return capture(model, (1, 3, size, size), torch.float32)


def _packed(program: Program, planes: int, **how: Any) -> Branches:
    return pack_branches(program, program.outputs, (), planes, **how)


def _seconds(program: Program) -> dict[str, float]:
    m = reference_machine()
    found = zip(program.operators, operator_costs(program), strict=True)
    return {op.name: cost.forward_s(m, 1.0, False) + cost.backward_s(m, 1.0, False) for op, cost in found}


def _loads(program: Program, branches: Branches) -> list[float]:
    seconds, loads = _seconds(program), [0.0] * branches.planes
    for name, plane in branches.owners.items():
        loads[plane] += seconds[name]
    return loads


def test_branches_are_packed_by_cost() -> None:
    """Longest first: of all ways to put five branches on two planes, none is more than a sixth better (Graham 1969)."""
    program = _program(Fan(9, 7, 5, 3, 3))
    branches = _packed(program, 2)
    loads, seconds = _loads(program, branches), _seconds(program)
    rows = [[op.name for op in program.operators if op.module.startswith(f"branches.{at}")] for at in range(5)]
    for row in rows:
        assert len({branches.owners[name] for name in row}) == 1, "a branch stays in one plane"
    costs = [sum(seconds[name] for name in row) for row in rows]
    ways = (sum(c for c, plane in zip(costs, way, strict=True) if plane) for way in product((0, 1), repeat=5))
    assert max(loads) <= 7 / 6 * min(max(load, sum(costs) - load) for load in ways)


def test_what_is_not_parallel_is_computed_in_every_plane() -> None:
    program = _program(Fan(3, 3))
    branches = _packed(program, 2)
    assert {op.module for op in program.operators if op.name not in branches.owners} == {"stem", ""}
    order = branches.order
    for op in program.operators:
        before = [other for other in program.operators if set(other.outputs) & set(op.inputs)]
        assert all(order[other.name] < order[op.name] for other in before)


def test_a_row_of_operators_is_not_divided() -> None:
    program = _program(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    assert not _packed(program, 2).owners


def test_shortcuts_are_branches() -> None:
    program = _program(resnet10(2, width=8))
    divided = {op.module for op in program.operators if op.name in _packed(program, 2).owners}
    assert any("downsample" in module or "shortcut" in module for module in divided)


def test_no_division_where_messages_take_longer() -> None:
    """Of two branches, one hardly computes anything: sending it would take longer than computing it twice."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Fan(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            return torch.sigmoid(x) * torch.tanh(x)

    program = _program(Gate(), 128)
    branches = _packed(program, 2)
    assert branches.owners and all("body" in op.module for op in program.operators if op.name in branches.owners)
