"""Operators without a rule run on gathered maps, if these are small: equal to one process, and said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from tests.harness import assert_equal_also_by_cells, run_copies

MOVES: dict[str, Any] = {
    "sums of exponentials so far": lambda x: x.logcumsumexp(3),
    "pixels": lambda x: x[:, :, [2, 0, 1]],
    "rows by rows": lambda x: torch.einsum("bchw,bchv->bcwv", x, x),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x)[:, :, :, None],
}


class Moved(nn.Module):
    """Two layers with something strange between them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first, self.norm = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.last = nn.LazyConv2d(3, 3, padding=1)

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(MOVES[self.name](torch.relu(self.norm(self.first(x))))).mean((2, 3))


def moved(name: str) -> Moved:
    torch.manual_seed(0)
    model = Moved(name)
    model(torch.zeros(2, 3, 9, 12))
    return model


@pytest.mark.parametrize("grid", [(2, 2), (6, 1)])  # 5 rows: the last has a part that owns nothing
@pytest.mark.parametrize("name", MOVES)
def test_small_maps_are_gathered_and_parts_again_behind(name: str, grid: tuple[int, int]) -> None:
    assert_equal_also_by_cells(moved(name), (2, 3, 9, 12), grid, classes=3)


def test_it_is_said_and_beyond_the_limit_refused() -> None:
    program = capture(moved("sums of exponentials so far"), (2, 3, 9, 12), torch.float32)
    ranked = lower(program, Target((2, 2), 0, gather_bytes=960))
    assert ranked.gathered == ("aten.logcumsumexp.default: (2, 4, 5, 6), 960 bytes on every rank",)
    found = next(op.outputs[0] for op in program.operators if op.text == "aten.logcumsumexp.default")
    assert found in ranked.splits, "what follows is computed by parts again"
    with pytest.raises(
        RequestError, match=r"logcumsumexp.*no rule.*a grid of one rank; or plan\.gather_bytes=960 or more"
    ):
        lower(program, Target((2, 2), 0, gather_bytes=959))


def test_an_engine_says_what_it_gathers() -> None:
    plan = ParallelPlan(((1, 2),))

    def body(comm: Any, module: nn.Module) -> str:
        return hyfi_core.parallelize(module, (2, 3, 9, 12), plan, comm).describe()

    (told, other) = run_copies(moved("sums of exponentials so far"), 2, body)
    assert told == other
    assert told.startswith(plan.describe().rstrip())
    assert "gathered on every rank: aten.logcumsumexp.default: (2, 4, 5, 6), 960 bytes on every rank" in told


def test_a_refused_rule_leaves_nothing_behind() -> None:
    program = capture(moved("rows by rows"), (2, 3, 9, 12), torch.float32)
    ranked = lower(program, Target((2, 2), 0))
    made = [name for step in ranked.instructions for name in step.outputs if name is not None]
    assert len(made) == len(set(made))
    assert {name for step in ranked.instructions for name in step.inputs if name is not None} <= {
        *made,
        program.image,
        *program.parameters,
        *program.buffers,
        *program.constants,
    }


class Fourier(nn.Module):
    """A filter of frequencies, which are complex, and windows of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.filter, self.head = (
            nn.Conv2d(3, 4, 3, 2, 1),
            nn.Parameter(torch.rand(4, 4, 3, 2)),
            nn.Linear(4, 2),
        )
        self.mix = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.complex128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft2(self.stem(x), norm="ortho") * torch.view_as_complex(self.filter)
        filtered = torch.fft.irfft2(frequencies, s=(4, 5), norm="ortho")
        spread = self.mix(frequencies).var((2, 3))
        return self.head(filtered.amax((2, 3)) + frequencies.abs().mean((2, 3)) + spread)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)])
def test_gradients_go_through_complex_values(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_also_by_cells(Fourier(), (2, 3, 7, 9), grid)


def test_a_shape_that_depends_on_the_image_is_refused_with_its_line() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].mean().expand(2, 2)

    with pytest.raises(RequestError, match=r"depends on the image, as in x\[x > 0\].*test_replicated.py.*torch.where"):
        capture(Masked(), (2, 3, 7, 9), torch.float32)
