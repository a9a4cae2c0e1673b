"""Arithmetic of each operator, from shapes alone, against torch's counter around a forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyfi_core.capture.export import capture
from hyfi_core.capture.stages import cut_program
from hyfi_core.cost.operators import KnownCosts, operator_costs


class Products(nn.Module):
    """Convolutions, grouped and transposed, a linear layer of every position, products of two maps, a weight as is."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.grouped = nn.Conv2d(16, 32, (3, 1), padding=(1, 0), groups=4)
        self.up = nn.ConvTranspose2d(32, 8, 3, 2)
        self.project = nn.Linear(32, 48)
        self.mixing = nn.Parameter(torch.randn(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.grouped(self.patch(x))
        q, k, v = self.project(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        mixed = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1) @ v
        return (mixed @ self.mixing).mean(1) + self.up(x).mean() + torch.mm(mixed[0], self.mixing).mean()


def test_operations_are_as_many_as_torch_counts() -> None:
    model, shape = Products(), (2, 3, 32, 24)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(shape))
    costs = operator_costs(capture(model, shape, torch.float32))
    assert sum(cost.flops for cost in costs) == counter.get_total_flops() > 0


def test_known_costs_are_those_of_each_stage_alone() -> None:
    """Plans share what they know of operators, whose cost depends on which gradients a stage has."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    program = capture(model, (1, 3, 8, 8), torch.float32)
    known: KnownCosts = {}
    for cuts in ((), ("0",), ("1",), ("0", "2")):
        for piece in cut_program(program, program.outputs, cuts):
            for active in (None, frozenset[str](), frozenset(program.parameters), frozenset(program.values)):
                alone = operator_costs(piece.program, active=active)
                assert operator_costs(piece.program, active=active, known=known) == alone
    assert len(known) > 4
