"""Weights changed from outside: on every rank alike as in one process, on some ranks refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.comm.agreement.weight_watch import WeightWatch
from hyfi_core.errors import RequestError
from hyfi_core.runtime.engine import Engine
from tests.harness import run_copies

SHAPE = (2, 3, 8, 11)
PLANS = {
    "parts": ParallelPlan(grids=((1, 2),)),
    "replicas": ParallelPlan(grids=((1, 2),), replicas=2),
    "stages": ParallelPlan(grids=((1, 2), (1, 1)), cuts=("1",)),
    "directions": ParallelPlan(grids=((1, 1), (1, 1)), cuts=("1",), microbatches=2, schedule="chimera"),
    "mirror": ParallelPlan(
        grids=((1, 1), (1, 1)), cuts=("1",), microbatches=2, schedule="chimera", mirror="point_to_point"
    ),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2)).double()


@torch.no_grad()
def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def halve_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def load_other(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def load_same(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def nothing(model: nn.Module) -> None:
    pass


def steps(engine: Engine, model: nn.Module, change: Callable[[nn.Module], Any], between: bool = False) -> Any:
    """Train three steps; change the weights after the first, or between its gradient and its update."""
    replica = engine._groups.replica_index
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * replica + step)
        engine.accumulate(torch.randn(SHAPE, dtype=torch.float64, generator=generator), torch.tensor([0, 1]))
        if step == 0 and between:
            change(model)
        engine.update()
        if step == 0 and not between:
            if change is halve_data:
                engine.settle()  # it leaves no trace where weights are still 0 because the new ones have not arrived
            change(model)
    return engine.gather_state_dict()


def made(comm: Any, model: nn.Module, plan: ParallelPlan) -> Engine:
    return hyfi_core.parallelize(
        model, SHAPE, plan, comm, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), verify=False
    )


def refusal(plan: ParallelPlan, body: Callable[[Any, nn.Module], Any]) -> str:
    """Return what all ranks say, each of which must refuse."""

    def refused(comm: Any, model: nn.Module) -> str:
        with pytest.raises(RequestError) as told:
            body(comm, model)
        return str(told.value)

    (said,) = set(run_copies(network(), plan.ranks, refused))
    return said


@pytest.mark.parametrize("change", [halve, halve_data, replace_data, load_other])
@pytest.mark.parametrize("plan", PLANS)
def test_a_change_on_one_rank_is_refused(plan: str, change: Callable[[nn.Module], Any]) -> None:
    odd = PLANS[plan].ranks - 1
    said = refusal(
        PLANS[plan],
        lambda comm, model: steps(made(comm, model, PLANS[plan]), model, change if comm.rank == odd else nothing),
    )
    assert "ranks disagree: weight" in said
    assert re.search(rf"changed on ranks? {odd} since|one value on ranks? {odd}\b|changed through .data", said), said


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("change", [halve, halve_data, replace_data, load_other])
@pytest.mark.parametrize("plan", ["parts", "stages", "directions", "mirror"])
def test_the_same_change_on_every_rank_equals_one_process(
    plan: str, change: Callable[[nn.Module], Any], between: bool
) -> None:
    def alone(comm: Any, model: nn.Module) -> Any:
        chunks = PLANS[plan].microbatches
        return steps(made(comm, model, ParallelPlan(grids=((1, 1),), microbatches=chunks)), model, change, between)

    (wanted,) = run_copies(network(), 1, alone)
    found, *_ = run_copies(
        network(), PLANS[plan].ranks, lambda comm, model: steps(made(comm, model, PLANS[plan]), model, change, between)
    )
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11, msg=name)


def test_the_message_names_weights_and_ranks() -> None:
    def only_first(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].bias.add_(1.0)

    plan = ParallelPlan(grids=((1, 3),))
    said = refusal(plan, lambda c, m: steps(made(c, m, plan), m, only_first if c.rank == 1 else nothing))
    assert "weight '0.bias' (one value on ranks 0, 2; one value on rank 1)" in said
    assert "changed on rank 1 since the last step, but not on ranks 0, 2" in said
    assert "engine.load_state_dict" in said


def test_other_values_on_every_rank_are_refused() -> None:
    plan = PLANS["parts"]
    said = refusal(plan, lambda c, m: steps(made(c, m, plan), m, lambda m: torch.nn.init.constant_(m[0].bias, c.rank)))
    assert "'0.bias' (one value on rank 0; one value on rank 1): changed on ranks 0-1 since the last step, but" in said


def test_weights_loaded_on_one_rank_before_the_first_step_or_a_prediction_are_refused() -> None:
    def loaded(comm: Any, model: nn.Module, call: str) -> None:
        engine = made(comm, model, PLANS["parts"])
        if comm.rank == 1:
            engine.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        images = torch.zeros(SHAPE, dtype=torch.float64)
        engine.predict(images) if call == "predict" else engine.accumulate(images, torch.tensor([0, 1]))

    for call in ("predict", "accumulate"):
        said = refusal(PLANS["parts"], lambda comm, model, call=call: loaded(comm, model, call))
        assert "'0.weight' and 7 more" in said
        assert "changed on rank 1" in said


@pytest.mark.parametrize("call", ["predict", "accumulate"])
def test_other_states_loaded_on_every_rank_are_refused_although_each_stage_has_one_rank(call: str) -> None:
    plan = ParallelPlan(grids=((1, 1), (1, 1)), cuts=("1",))

    def loaded(comm: Any, model: nn.Module, factor: Callable[[int], float]) -> float:
        engine = made(comm, model, plan)
        engine.load_state_dict({name: value * factor(comm.rank) for name, value in model.state_dict().items()})
        images = torch.ones(SHAPE, dtype=torch.float64)
        return float(
            engine.predict(images).sum() if call == "predict" else engine.accumulate(images, torch.tensor([0, 1]))
        )

    said = refusal(plan, lambda comm, model: loaded(comm, model, lambda rank: 1.0 + rank))
    assert "ranks disagree: the state that was loaded is one with digest" in said
    first, second = run_copies(network(), 2, lambda comm, model: loaded(comm, model, lambda rank: 2.0))
    assert first == second


def test_equal_weights_loaded_on_one_rank_are_no_change() -> None:
    def body(comm: Any, model: nn.Module) -> Any:
        return steps(made(comm, model, PLANS["stages"]), model, load_same if comm.rank == 0 else nothing)

    wanted, *_ = run_copies(network(), 3, lambda comm, model: steps(made(comm, model, PLANS["stages"]), model, nothing))
    found, *_ = run_copies(network(), 3, body)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_rank_without_the_stage_may_hold_what_its_owner_has() -> None:
    def body(comm: Any, model: nn.Module) -> Any:
        engine = made(comm, model, PLANS["stages"])
        engine.train_step(torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1]))
        state = engine.gather_state_dict()
        if state is not None:
            model.load_state_dict(state)  # a copy of the whole model on one rank, to evaluate or save it
        return engine.train_step(torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1]))

    assert len(set(run_copies(network(), 3, body))) == 1


def test_gradients_and_optimizer_states_changed_on_one_rank_are_refused_one_step_later() -> None:
    def clipped(comm: Any, model: nn.Module) -> None:
        engine = made(comm, model, PLANS["parts"])
        for _ in range(2):
            engine.accumulate(torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1]))
            if comm.rank == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            engine.update()

    assert "gradients or optimizer states that were changed on some ranks only" in refusal(PLANS["parts"], clipped)


def test_an_optimizer_stepped_by_the_user_in_two_directions_is_refused() -> None:
    def stepped(comm: Any, model: nn.Module) -> None:
        engine = made(comm, model, PLANS["mirror"])
        for _ in range(2):
            engine.accumulate(torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1]))
            engine.optimizer.step()

    assert "ranks disagree: weight" in refusal(PLANS["mirror"], stepped)


def test_after_a_refusal_equal_weights_go_on() -> None:
    def body(comm: Any, model: nn.Module) -> float:
        engine = made(comm, model, PLANS["parts"])
        held = copy.deepcopy(model.state_dict())
        images, labels = torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
        if comm.rank == 0:
            halve(model)
        with pytest.raises(RequestError, match="ranks disagree"):
            engine.accumulate(images, labels)
        engine.load_state_dict(held)
        return engine.accumulate(images, labels)

    assert len(set(run_copies(network(), 2, body))) == 1


def test_every_value_is_sampled_in_some_turn() -> None:
    model = nn.Conv2d(7, 9, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    watch = WeightWatch(model, lambda: ())
    turns = range(-(-model.weight.numel() // 64))
    before = [watch.sample(["weight", "bias"], turn) for turn in turns]
    for place in ((0, 0, 0, 0), (8, 6, 2, 2), (3, 1, 0, 2)):
        changed = model.weight.data[place].clone()
        model.weight.data[place] += 1
        now = [watch.sample(["weight", "bias"], turn) for turn in turns]
        assert sum(a != b for a, b in zip(before, now, strict=True)) == 1
        model.weight.data[place] = changed
