"""What the optimizer of a rank is made of, and its state by parameter name."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.runtime.saving.optimizer_state import load_optimizer_state, optimizer_state
from tests.harness import run_copies


def test_a_state_of_another_model_is_refused_with_both_numbers() -> None:
    saved_of, loaded_into = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = optimizer_state(torch.optim.SGD(saved_of.parameters(), 0.1), saved_of.named_parameters())
    optimizer = torch.optim.SGD(loaded_into.parameters(), 0.1)
    with pytest.raises(RequestError, match="2 in 1 saved, 4 in 1 now; resume with the same model"):
        load_optimizer_state(optimizer, loaded_into.named_parameters(), saved)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_an_optimizer_of_trainable_parameters_works_where_a_stage_has_none(schedule: Any) -> None:
    plan = hyfi_core.ParallelPlan(grids=((1, 1), (1, 1)), cuts=("1",), microbatches=2, schedule=schedule)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.double()[0].requires_grad_(False)
    images, labels = torch.randn(4, 3, 9, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])

    def trainable(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.1)

    def body(comm: Any, net: nn.Module) -> dict[str, torch.Tensor] | None:
        engine = hyfi_core.parallelize(net, (4, 3, 9, 8), plan, comm, optimizer=trainable)
        torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        for _ in range(2):
            engine.train_step(images, labels)
        return engine.gather_state_dict()

    found = run_copies(model, plan.ranks, body)[0]
    optimizer = trainable(model.parameters())
    for _ in range(2):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.allclose(found[name], value, rtol=1e-9) for name, value in model.state_dict().items())


def test_an_optimizer_that_refuses_its_parameters_is_reported_with_their_number() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(RequestError, match=r"optimizer raised ValueError: .* it was passed 2 parameters"):
        hyfi_core.parallelize(
            model,
            (1, 3, 9, 8),
            hyfi_core.ParallelPlan(((1, 1),)),
            AloneCommunicator(),
            optimizer=lambda params: torch.optim.SGD([p for p in params if p.ndim == 7]),
        )


@pytest.mark.parametrize("mirrored", [False, True])
def test_an_optimizer_of_matrices_works_where_a_stage_has_none(mirrored: bool) -> None:
    grids = (1, 1), (1, 1)
    plan = hyfi_core.ParallelPlan(grids, ("0",), 2)
    if mirrored:
        plan = hyfi_core.ParallelPlan(grids, ("0",), 2, "chimera", mirror="point_to_point")
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
    model = nn.Sequential(*layers).double()
    images, labels = torch.randn(4, 3, 9, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1)

    def body(comm: Any, net: nn.Module) -> dict[str, torch.Tensor] | None:
        engine = hyfi_core.parallelize(net, (4, 3, 9, 8), plan, comm, optimizer=muon)
        for _ in range(2):
            engine.train_step(images, labels)
        return engine.gather_state_dict()

    found = run_copies(model, 2, body)[0]
    assert found is not None
    optimizer = muon(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


def test_an_optimizer_of_nothing_at_all_is_refused() -> None:
    def matrices_of_five_dims(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.dim() == 5], lr=0.1)

    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    plan = hyfi_core.ParallelPlan(((1, 1),))
    with pytest.raises(RequestError, match="empty parameter list"):
        hyfi_core.parallelize(net, (4, 3, 9, 8), plan, AloneCommunicator(), optimizer=matrices_of_five_dims)


@pytest.mark.parametrize(("cut", "is_refused"), [("2", True), ("1", False)])
def test_weights_in_the_same_memory_are_refused_in_two_stages(cut: str, is_refused: bool) -> None:
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1)), cuts=(cut,))
    first = nn.Conv2d(3, 4, 1)

    def body(comm: Any, first: nn.Module) -> None:
        tied = [nn.Conv2d(4, 4, 1, bias=False) for _ in range(2)]
        tied[1].weight.data = tied[0].weight.data  # a copy of the module would have memory for each
        net = nn.Sequential(first, nn.Tanh(), *tied, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        hyfi_core.parallelize(net, (4, 3, 9, 8), plan, comm)

    refusal = pytest.raises(RequestError, match=r"^'2.weight' and '3.weight' of the model are different tensors in the")
    with refusal if is_refused else contextlib.nullcontext():
        run_copies(first, 2, body)


class Masked(nn.Module):
    """Layers of two stages, each with a view of one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.register_buffer("first", torch.ones(3, 1, 1))
        self.register_buffer("second", torch.ones(1, 3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x * self.first)
        return (self.leave(x) * self.second).mean((2, 3))


def test_constant_buffers_may_be_in_the_same_memory() -> None:
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1)), cuts=("enter",))
    mask = torch.ones(3)

    def body(comm: Any, module: nn.Module) -> None:
        module.first, module.second = mask.view(3, 1, 1), mask.view(1, 3, 1, 1)
        hyfi_core.parallelize(module, (4, 3, 9, 8), plan, comm)

    run_copies(Masked(), 2, body)


class UsedElsewhere(nn.Module):
    """Weights of the first stage that the last one uses, too: in evaluation, or if ``again``; ``more`` adds a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.more = False
        self.enter, self.norm, self.late = nn.Conv2d(3, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)
        self.added, self.head = nn.Conv2d(3, 3, 1), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.late(self.norm(self.enter(x)).relu())
        if self.again or not self.training:
            x = self.enter(x)
        if self.more:
            x = x + self.added(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("fields", [{}, {"schedule": "gems_master", "mirror": "point_to_point"}])
def test_weights_of_another_stage_are_up_to_date_in_evaluation(fields: dict[str, Any]) -> None:
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1), (1, 1)), cuts=("norm", "late"), microbatches=2, **fields)
    images, labels = torch.randn(4, 3, 19, 18, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    model = UsedElsewhere().double()

    def body(comm: Any, net: nn.Module) -> list[torch.Tensor]:
        engine = hyfi_core.parallelize(net, (4, 3, 19, 18), plan, comm, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        found = [engine.predict(images)]
        for _ in range(3):
            engine.accumulate(images, labels)
            before = engine.predict(images)
            engine.update()
            found += [before, engine.predict(images)]
        return found

    found_by_rank = run_copies(model, plan.ranks, body)
    wanted = _steps_of_one(model, images, labels, plan.microbatches)
    for found in found_by_rank:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def _steps_of_one(net: nn.Module, images: torch.Tensor, labels: torch.Tensor, microbatches: int) -> list[torch.Tensor]:
    """Return what one process predicts at first, and before and behind each of three updates."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def predicted() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = net.eval()(images)
        net.train()
        return logits

    found = [predicted()]
    for _ in range(3):
        for part, targets in zip(images.chunk(microbatches), labels.chunk(microbatches), strict=True):
            (F.cross_entropy(net(part), targets) / microbatches).backward()
        found.append(predicted())
        optimizer.step()
        optimizer.zero_grad()
        found.append(predicted())
    return found


@pytest.mark.parametrize(("attribute", "name"), [("again", "enter.weight"), ("more", "added.weight")])
def test_weights_that_other_stages_begin_to_train_are_refused(attribute: str, name: str, tmp_path: Path) -> None:
    """They were not among the weights of their ranks' optimizers, which left them as they were."""
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1)), cuts=("norm",))
    images, labels = torch.randn(2, 3, 19, 18, dtype=torch.float64), torch.tensor([0, 1])

    def engine_of(comm: Any, net: nn.Module) -> hyfi_core.Engine:
        return hyfi_core.parallelize(net, (2, 3, 19, 18), plan, comm, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

    def body(comm: Any, net: nn.Module) -> Any:
        engine, later = engine_of(comm, net), copy.deepcopy(net)
        engine.train_step(images, labels)
        engine.save(tmp_path / "saved")
        setattr(net, attribute, True)
        with pytest.raises(RequestError, match=f"'{name}' of the model is trained by stages .* when the engine was"):
            engine.train_step(images, labels)
        setattr(later, attribute, True)
        engine = engine_of(comm, later)
        engine.load(tmp_path / "saved")
        engine.train_step(images, labels)
        return engine.gather_state_dict()

    model = UsedElsewhere().double()
    found = run_copies(model, plan.ranks, body)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        setattr(model, attribute, True)
    for each, value in model.state_dict().items():
        torch.testing.assert_close(found[each], value, rtol=1e-10, atol=1e-10)
