"""Memory that may be written over: nothing of what the plan calls free is ever read again, whoever holds it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.waits import Waits
from hyfi_core.lowering import in_place, reuse
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.lowering.segments import Tape, build_tape
from hyfi_core.models import amoebanet, resnet
from hyfi_core.ops.buffers import Buffers
from hyfi_core.ops.max_pool import MaxPool, WholeMaxPool
from hyfi_core.ops.norms.batch_norm import BatchNorm
from hyfi_core.ops.relu import Relu
from hyfi_core.runtime import backward
from tests.harness import Result, assert_equal_to_one_process, compare, identity, one_process, parallel
from tests.hyfi_core.cells.small_models import Dense
from tests.test_other_networks import densenet, se_resnet


class Aliases(nn.Module):
    """Values that share memory in every way: views, sums of the same map, a parameter added to a map, one map twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.offset, self.folded = nn.Parameter(torch.randn(1, 4, 16, 16)), nn.Parameter(torch.randn(4, 16, 16))
        self.after, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        a = self.norm(self.stem(images)) + self.offset
        b = torch.relu(a + self.folded.view(1, 4, 16, 16))  # the cotangent goes to a, to both parameters, and on
        c = torch.relu(self.left(b) + self.right(b) + b)
        d = F.max_pool2d(c.view(c.shape), 3, 1, 1) + c
        e = torch.cat([torch.relu(d), d[:, :, :, :] * 1.0], 1).transpose(2, 3)
        return self.fc(torch.relu(self.after(e)).mean((2, 3)))


class Wide(nn.Module):
    """Pools whose maps others use as well, before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.more = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.fc = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        a = self.norm(self.stem(images))
        b = F.max_pool2d(a, 3, 2, 1) + F.max_pool2d(torch.relu(a), 3, 2, 1) + F.max_pool2d(a, 5, 2, 2)
        c = self.more(b)
        d = F.silu(c) + F.max_pool2d(c, 3, 1, 1) + F.avg_pool2d(c, 3, 1, 1)
        return self.fc(torch.relu(d).amax((2, 3)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int, int]]] = {
    "resnet": (lambda: resnet.resnet10(2), (2, 3, 64, 64)),
    "resnet_v2": (lambda: resnet.resnet_v2(11, 2), (1, 3, 32, 32)),
    "dense": (Dense, (2, 3, 40, 48)),
    "densenet": (densenet, (2, 3, 40, 48)),
    "amoebanet": (lambda: amoebanet.amoebanet_d(2, layers=3, filters=16), (1, 3, 64, 64)),
    "squeeze_excite": (se_resnet, (1, 3, 65, 64)),
    "aliases": (Aliases, (1, 3, 16, 16)),
    "wide": (Wide, (2, 3, 32, 32)),
}


LARGE = ("amoebanet", "densenet")


@contextlib.contextmanager
def poisoned() -> Iterator[list[str]]:
    """Fill with NaN whatever the plan calls free, as soon as it does; yield what was filled."""
    filled: list[str] = []

    def spoil(what: str, tensor: torch.Tensor) -> None:
        filled.append(what)
        tensor.detach().fill_(255 if tensor.dtype == torch.uint8 else torch.nan)

    def with_spoilt_cotangent(plain: Any, at: int) -> Any:
        def method(self: Any, *given: Any) -> Any:
            if not self.overwrites_cotangent or given[at][0] is None:
                return plain(self, *given)
            kept = (given[at][0].clone(), *given[at][1:])
            spoil("cotangent", given[at][0])
            return plain(self, *given[:at], kept, *given[at + 1 :])

        return method

    def with_spoilt_map(plain: Any, at: int) -> Any:
        def method(self: Any, *given: Any) -> Any:
            found = plain(replace(self, overwrites_map=False), *given)
            return waited_for(self, found, given) if isinstance(found, Generator) else spoilt(self, found, given)

        def waited_for(self: Any, steps: Any, given: Any) -> Waits[Any]:
            return spoilt(self, (yield from steps), given)

        def spoilt(self: Any, found: Any, given: Any) -> Any:
            if self.overwrites_map and getattr(self, "holds_map", True) and isinstance(given[at][0], torch.Tensor):
                spoil("map", given[at][0])
            return found

        return method

    def with_spoilt_input(self: Relu, inputs: Any) -> Any:
        result = inputs[0].relu()
        if self.overwrites_input:
            spoil("input", inputs[0])
        return (result,), result

    def with_spoilt_operand(target: int, other: int) -> Any:
        def call(*operands: Any) -> Any:
            result = torch.add(*operands)
            spoil("operand", operands[target])
            return result

        return call

    def with_spoilt_sum(held: torch.Tensor, new: torch.Tensor, over: Any) -> torch.Tensor:
        total = held + new
        if over is not None:
            spoil("sum", held if over == "held" else new)
        return total

    def with_spoilt_buffers(self: Buffers, tensors: Any) -> None:
        given = list(tensors)
        for tensor in given:
            spoil("buffer", tensor)
        give_back(self, given)

    give_back = Buffers.give_back
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "SMALL_BYTES", 0)  # maps of tests are small
        patch.setattr(Relu, "backward", with_spoilt_cotangent(Relu.backward, 1))
        patch.setattr(Relu, "forward", with_spoilt_input)
        patch.setattr(BatchNorm, "start_backward", with_spoilt_cotangent(BatchNorm.start_backward, 2))
        patch.setattr(MaxPool, "backward", with_spoilt_map(MaxPool.backward, 1))
        patch.setattr(WholeMaxPool, "backward", with_spoilt_map(WholeMaxPool.backward, 0))
        patch.setattr(in_place, "_sum_over", with_spoilt_operand)
        patch.setattr(backward, "_sum", with_spoilt_sum)
        patch.setattr(Buffers, "give_back", with_spoilt_buffers)
        yield filled


def by_plan(name: str, plan: hyfi_core.ParallelPlan) -> tuple[Result, Result]:
    """Return what a plan leaves behind, and what one process does."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, images = make().double(), torch.randn(shape, dtype=torch.float64)
    labels = torch.arange(shape[0]) % 2
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    return found, one_process(copy.deepcopy(model), images, labels, plan.microbatches, F.cross_entropy, identity)


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in LARGE else name for name in NETWORKS]
)
def test_what_the_plan_calls_free_is_never_read_again(name: str, grid: tuple[int, int]) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    with poisoned() as filled:
        assert_equal_to_one_process(make(), shape, grid, fused_halo=1)
    assert "cotangent" in filled  # it did happen


@pytest.mark.parametrize(
    "plan",
    [
        hyfi_core.ParallelPlan(grids=((1, 2), (1, 1)), cuts=("layer2",), microbatches=2, schedule="1f1b"),
        hyfi_core.ParallelPlan(grids=((1, 2), (2, 1)), cuts=("layer2",), microbatches=2, recompute=True),
        hyfi_core.ParallelPlan(grids=((1, 1), (1, 1)), cuts=("layer2",), microbatches=2, schedule="gems_mast"),
        hyfi_core.ParallelPlan(grids=((1, 1),), cells=(1, 2)),
        hyfi_core.ParallelPlan(grids=((2, 2),), fused_halo=3),
    ],
    ids=["stages", "recompute", "two directions", "cells", "fused"],
)
def test_nor_is_it_between_stages_of_cells_and_in_fused_runs(plan: hyfi_core.ParallelPlan) -> None:
    with poisoned() as filled:
        found, wanted = by_plan("resnet", plan)
    compare(found, wanted)
    assert "cotangent" in filled and ("buffer" in filled or plan.ranks == 1)


def test_a_plan_that_frees_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse.BackwardMemory, "_alone", lambda self, memory, others: True)
    with poisoned(), pytest.raises(AssertionError):
        assert_equal_to_one_process(resnet.resnet10(2), (2, 3, 64, 64), (1, 2), fused_halo=1)


def test_a_pool_that_frees_a_map_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_saves_nothing", lambda instruction, pools_save: True)
    with poisoned(), pytest.raises((AssertionError, RuntimeError)):
        assert_equal_to_one_process(Wide(), NETWORKS["wide"][1], (1, 2), fused_halo=1)


# -- what the plan says


def tape_of(model: nn.Module, shape: tuple[int, int, int, int], grid: tuple[int, int], **how: Any) -> Tape:
    program = capture(model, shape, torch.float32)
    return build_tape(lower(program, Target(grid, 0), **how), program.parameters)


def overs(tape: Tape, kind: type) -> list[bool]:
    operators = [step.call.operator for step in tape.steps if hasattr(step, "call")]
    return [found.overwrites_cotangent for found in operators if isinstance(found, kind)]


def test_of_two_that_share_a_cotangent_the_first_to_run_backward_leaves_it_and_the_second_may_have_it() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.first, self.second = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            return torch.relu(self.first(x) + self.second(x)).amax((2, 3))

    assert overs(tape_of(Sum(), (1, 3, 32, 32), (1, 2)), BatchNorm) == [True, False]  # backward begins at the end


def test_the_answers_cotangent_is_the_users_and_that_of_an_exit_is_given_away() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    assert overs(tape_of(model, (1, 3, 32, 32), (1, 1)), Relu) == [False]
    program = capture(model, (1, 3, 32, 32), torch.float32)
    exits = tuple(item.name for item in program.outputs)
    ranked = lower(program, Target((1, 2), 0), (), exits)
    assert overs(build_tape(ranked, program.parameters), Relu) == [True]


def test_what_a_parameter_keeps_is_not_written_over() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
            self.offset = nn.Parameter(torch.zeros(1, 4, 32, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.conv(x)) + self.offset).amax((2, 3))

    assert overs(tape_of(Offset(), (1, 3, 32, 32), (1, 2)), BatchNorm) == [False]


def test_an_unknown_backward_may_give_anything_to_anybody() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.norm(self.conv(x)))
            return torch.flip(x, (1,)).amax((2, 3))

    assert overs(tape_of(Turned(), (1, 3, 32, 32), (1, 1)), Relu) == [False]


# -- what users hold


def trained(model: nn.Module, images: torch.Tensor, loss: Any = F.cross_entropy) -> Any:
    """Train one step on one rank, on its own copy of the images; return the engine."""
    shape = (images.shape[0], images.shape[1], images.shape[2], images.shape[3])
    plan = hyfi_core.ParallelPlan(grids=((1, 1),))
    engine = hyfi_core.parallelize(model, shape, plan, AloneCommunicator(), loss=loss, verify=False)
    engine.accumulate(images, torch.zeros(images.shape[0], dtype=torch.int64))
    return engine


def test_the_answer_and_its_gradient_stay_as_a_loss_that_keeps_them_saw_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU())
    kept: list[Any] = []

    def loss(answer: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept.append((answer, answer.detach().clone()))
        return answer.square().mean()

    trained(model, torch.randn(2, 3, 16, 16), loss)
    (answer, seen), *_ = kept
    assert torch.equal(answer, seen) and torch.allclose(answer.grad, 2 * seen / seen.numel())


def test_what_a_hook_on_a_parameter_keeps_stays() -> None:
    torch.manual_seed(0)
    model, images = Aliases().double(), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(images), torch.tensor([0])).backward()
    kept: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: kept.update({name: gradient}))
    trained(model, images)
    assert "offset" in kept and "folded" in kept
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and (name not in kept or torch.allclose(kept[name], parameter.grad))


@pytest.mark.parametrize("first", [nn.ReLU(inplace=False), nn.MaxPool2d(3, 1, 1), nn.Identity()])
def test_the_callers_images_stay(first: nn.Module) -> None:
    model = nn.Sequential(
        first, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()
    )
    images = torch.randn(2, 3, 16, 16)
    before = images.clone()
    trained(model, images)
    assert torch.equal(images, before)


def test_an_answer_that_was_returned_stays_when_more_is_trained() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    images = torch.randn(2, 3, 16, 16)
    engine = trained(model, images, lambda answer, labels: answer.mean())
    answer = engine.predict(images)
    before = answer.clone()
    engine.accumulate(torch.randn(2, 3, 16, 16), torch.zeros(2, dtype=torch.int64))
    engine.predict(torch.randn(2, 3, 16, 16))
    assert torch.equal(answer, before)
