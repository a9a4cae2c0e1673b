"""A program cut into stages: what each does, what travels, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.capture.stages import ProgramCutter, active_values, cut_program, edges
from hyfi_core.errors import RequestError
from tests.harness import assert_equal_to_one_process, compare, identity, one_process, parallel

Grids = tuple[tuple[int, int], ...]

pytestmark = pytest.mark.captures_each


class Skips(nn.Module):
    """a feeds b and, past it, c; a mask that depends on nothing is used in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3 if n == 0 else 4, 4, 3, padding=1) for n in range(3))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(8, dtype=x.dtype).view(1, 1, 1, 8)
        a = self.a(x) * ramp
        b = self.b(a)
        c = self.c(b + a) * ramp
        return self.fc(c.mean((2, 3)))


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(Skips(), (1, 3, 8, 8), torch.float32)


def test_values_travel_straight_to_where_they_are_used(program: Program) -> None:
    stages = cut_program(program, program.outputs, ("a", "b"))
    assert edges(stages) == ((0, 1), (1, 2))
    (made,) = stages[0].exits[1]
    assert stages[1].entries[0] == (made,)
    assert len(stages[1].exits[2]) == 2  # a · ramp is made behind the cut, in stage 1, and b
    assert [stage.reads_image for stage in stages] == [True, False, False]
    assert stages[2].outputs and not stages[0].outputs


@pytest.mark.parametrize("cuts", [(), ("a",), ("b",), ("a", "b")])
def test_a_cutter_of_many_plans_sends_what_later_stages_use(program: Program, cuts: tuple[str, ...]) -> None:
    cutter = ProgramCutter(program, program.outputs)
    cutter.cut(("c",))
    stages = cutter.cut(cuts)
    assert stages == cut_program(program, program.outputs, cuts)
    makes = [{name for op in stage.program.operators for name in op.outputs} for stage in stages]
    for to, stage in enumerate(stages):
        received = {name for names in stage.entries.values() for name in names}
        used = {name for op in stage.program.operators for name in op.inputs}
        assert received == {name for name in used - makes[to] if any(name in before for before in makes[:to])}


def test_what_depends_on_nothing_is_made_again(program: Program) -> None:
    stages = cut_program(program, program.outputs, ("b",))
    ranges = [sum("arange" in op.text for op in stage.program.operators) for stage in stages]
    assert ranges == [1, 1]
    assert not any("arange" in name for names in stages[0].exits.values() for name in names)


def test_parameters_go_with_their_operators(program: Program) -> None:
    stages = cut_program(program, program.outputs, ("a", "b"))
    found = [sorted({name.split(".")[0] for name in stage.program.parameters.values()}) for stage in stages]
    assert found == [["a"], ["b"], ["c", "fc"]]


def test_gradients_are_carried_where_a_weight_and_the_answer_are_on_the_way(program: Program) -> None:
    only_c = [value for value, name in program.parameters.items() if name.startswith("c.")]
    active = active_values(program, program.outputs, only_c)
    stages = cut_program(program, program.outputs, ("a", "b"))
    assert not active & set(stages[1].exits[2])
    everything = active_values(program, program.outputs, program.parameters)
    assert set(stages[1].exits[2]) <= everything


def test_a_norm_that_two_stages_call_is_refused_by_name() -> None:
    class SharedLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.b(self.norm(self.a(x)))).mean((2, 3))

    shared = capture(SharedLayers(), (2, 3, 9, 9), torch.float32)
    with pytest.raises(RequestError, match=r"buffer 'norm\.\w+' is read or changed in several stages \(\[0, 1\]\)"):
        cut_program(shared, shared.outputs, ("b",))


class Counting(nn.Module):
    """Buffers of the root module: a counter of forwards, which scales, and a centre of features of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Linear(4, 2)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        y = self.a(x)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * y.detach().mean((0, 2, 3)))
        y = self.b((y - self.centre.view(1, -1, 1, 1)).relu())
        return self.fc(y.relu().mean((2, 3)) * torch.clamp(self.forwards / 4, max=1.0))


@pytest.mark.parametrize("grids", [((1, 1), (1, 1)), ((1, 2), (1, 1))])
def test_buffers_of_the_root_module_change_once_for_each_micro_batch(grids: Grids) -> None:
    torch.manual_seed(0)
    model, generator = Counting().double(), torch.Generator().manual_seed(0)
    images = torch.randn((2, 3, 9, 12), dtype=torch.float64, generator=generator)
    labels, plan = torch.tensor([0, 1]), hyfi_core.ParallelPlan(grids, ("a",), 2)
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    assert int(found.state["forwards"]) == 2
    compare(found, one_process(model, images, labels, 2, F.cross_entropy, identity))


class Casts(nn.Module):
    """Each cast is captured with a check of the type before it, an operator without a tensor as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).to(memory_format=torch.channels_last).double()
        y = self.b(y.to(x.dtype)).float().to(x.dtype)
        return self.fc(y.to(self.fc.weight.device).mean((2, 3)))


def test_checks_without_a_result_are_no_part_of_a_stage() -> None:
    program = capture(Casts(), (1, 3, 8, 8), torch.float32)
    checks = [op.name for op in program.operators if "_assert" in op.text]
    assert checks
    active = active_values(program, program.outputs, program.parameters)
    assert set(program.parameters) <= active and not active & set(checks)
    stages = cut_program(program, program.outputs, ("a",))
    assert not any("_assert" in op.text for stage in stages for op in stage.program.operators)


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_casts_equal_one_process(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(Casts(), (2, 3, 13, 16), grid, tolerance=1e-6)  # it rounds to float32


class Stopped(nn.Module):
    """Two layers that no gradient reaches: one behind a detach, one behind a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.a(x)
        return (self.c(x) * y * (self.b(x) > 0).float()).mean((2, 3))


def test_no_gradient_passes_a_detach_or_a_comparison() -> None:
    program = capture(Stopped(), (1, 3, 8, 8), torch.float32)
    active = active_values(program, program.outputs, program.parameters)
    assert {name for value, name in program.parameters.items() if value in active} == {"c.weight", "c.bias"}
    found = assert_equal_to_one_process(Stopped(), (2, 3, 8, 8), (1, 2))
    assert set(found.gradients) == {"c.weight", "c.bias"}
