"""In place: where an operand may be written over it is, and nowhere else; the numbers stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.comm.waits import Waits
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.ops.max_pool import MaxPool, WholeMaxPool
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.ops.relu import Relu
from hyfi_core.plan import ParallelPlan
from hyfi_core.rules.instructions import CustomCall, LocalCall, RankProgram
from hyfi_core.runtime.parallelize import parallelize
from tests.harness import assert_equal_to_one_process


class SharedInput(nn.Module):
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
    return lower(program, Target(grid, 0))


def relus_over(ranked: RankProgram) -> list[bool]:
    own = [i.operator for i in ranked.instructions if isinstance(i, CustomCall)]
    return [relu.overwrites_input for relu in own if isinstance(relu, Relu)]


def sums_over(ranked: RankProgram) -> list[bool]:
    computes = [i for i in ranked.instructions if isinstance(i, LocalCall) and i.source is not None]
    plain: list[Any] = [i for i in computes if i.source is not None and i.source.text == "aten.add.Tensor"]
    return ["_sum_over" in i.function.__qualname__ for i in plain]


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_only_what_nobody_needs_is_written_over(grid: tuple[int, int], training: bool) -> None:
    ranked = lowered(SharedInput().train(training), grid)
    assert relus_over(ranked) == [False, True, False]
    assert sums_over(ranked)[-2:] == [True, False]


def test_what_leaves_the_program_is_not_written_over() -> None:
    program = capture(SharedInput(), (1, 3, 24, 24), torch.float32)
    last = next(op for op in program.operators if op.text == "aten.add.Tensor" and op.args[1] != 1)
    normed = last.args[0].name
    ranked = lower(program, Target((1, 2), 0), exits=(normed,))
    assert sums_over(ranked)[-2:] == [False, False]


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_the_numbers_stay_the_same(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(SharedInput(), (2, 3, 24, 20), grid)


@pytest.mark.parametrize("columns", [1, 2])
def test_cotangents_of_a_chain_are_written_over(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def noted(found: Any, memory: int) -> Any:
        asked.append(found[0].data_ptr() == memory)
        return found

    def waiting(steps: Waits[Any], memory: int) -> Waits[Any]:
        return noted((yield from steps), memory)

    def watch(kind: type, place: Callable[..., torch.Tensor]) -> None:
        plain = kind.backward  # type: ignore[attr-defined]

        def backward(*given: Any) -> Any:
            memory = place(*given[-3:]).data_ptr()  # saved, cotangents, wanted
            found = plain(*given)
            return waiting(found, memory) if isinstance(found, Generator) else noted(found, memory)

        monkeypatch.setattr(kind, "backward", backward)

    for kind in (Relu, BatchNorm):
        watch(kind, lambda saved, cotangents, wanted: cotangents[0])
    for kind in (MaxPool, WholeMaxPool):
        watch(kind, lambda saved, cotangents, wanted: saved[0])
    monkeypatch.setattr("hyfi_core.lowering.in_place.SMALL_BYTES", 0)
    conv = nn.Conv2d(4, 4, 3, padding=1)
    stem = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    model = nn.Sequential(*stem, conv, nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def body(comm: Communicator) -> None:
        plan = ParallelPlan(grids=((1, columns),), fused_halo=1)
        engine = parallelize(copy.deepcopy(model), (1, 3, 96, 96), plan, comm)
        engine.accumulate(torch.ones(1, 3, 96, 96), torch.tensor([1]))

    run_ranks(columns, body)
    # The last relu's comes from a mean, one number for many pixels; all others are memory of their own.
    assert asked.count(False) == columns
    assert len(asked) == columns * (3 if columns == 1 else 5)  # one rank alone has the native norm


@pytest.mark.parametrize("training", [True, False])
def test_without_other_ranks_relus_of_small_maps_are_no_steps_and_give_the_same_numbers(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, images = SharedInput().train(training), torch.randn(2, 3, 24, 24)

    def result() -> tuple[int, float, dict[str, torch.Tensor]]:
        own = copy.deepcopy(model)
        engine = parallelize(own, (2, 3, 24, 24), ParallelPlan(((1, 1),)), AloneCommunicator(), verify=False)
        loss = engine.accumulate(images, torch.tensor([0, 1]))
        gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        return len(engine._lowered().only.tape.steps), loss, gradients

    steps, loss, gradients = result()
    monkeypatch.setattr("hyfi_core.lowering.in_place.SMALL_BYTES", 2 * 4 * 24 * 24 * 4 - 1)
    more, same, others = result()
    assert (steps, more) == (3, 9) and loss == same
    assert all(torch.equal(gradients[name], others[name]) for name in others) and len(others) == len(gradients)
