"""Habits of DDP that see one rank only: refused, or warned of once, with the engine's method."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hyfi_core
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import run_copies

SHAPE = (4, 3, 12, 14)
PLANS = {
    "alone": ParallelPlan(((1, 1),), microbatches=2),
    "parts": ParallelPlan(((1, 2),), microbatches=2),
    "replicas": ParallelPlan(((1, 1),), microbatches=2, replicas=2),
    "stages": ParallelPlan(((1, 1), (1, 1)), ("0",), 2),
    "directions": ParallelPlan(((1, 1), (1, 1)), ("0",), 2, "chimera"),
    "mirror": ParallelPlan(((1, 1), (1, 1)), ("0",), 2, "chimera", mirror="point_to_point"),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def data(step: int, replica: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * replica + step)
    return torch.randn(SHAPE, dtype=torch.float64, generator=generator), torch.tensor([0, 1, 2, step % 3])


def engine_of(comm: Any, module: nn.Module, plan: str, **more: Any) -> Any:
    return hyfi_core.parallelize(module, SHAPE, PLANS[plan], comm, optimizer=sgd, **more)


@pytest.mark.parametrize("plan", PLANS)
def test_update_returns_the_norm_that_one_process_clips(plan: str) -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        engine = engine_of(comm, module, plan)
        norms = []
        for step in range(3):
            engine.accumulate(*data(step, comm.rank // PLANS[plan].ranks_per_replica))
            norms.append(engine.update(max_norm=0.01 if step else 100.0))
        engine.accumulate(*data(0))
        return norms, engine.update(), engine.gather_state_dict()

    results = run_copies(network(), PLANS[plan].ranks, body)
    alone, wanted = network(), []
    optimizer = sgd(list(alone.parameters()))
    for step in range(3):
        for replica in range(PLANS[plan].replicas):
            images, labels = data(step, replica)
            (F.cross_entropy(alone(images), labels) / PLANS[plan].replicas).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.01 if step else 100.0)
        wanted.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    for norms, unclipped, _ in results:
        assert norms == pytest.approx(wanted, rel=1e-9) and unclipped is None


@pytest.mark.parametrize("own", [False, True], ids=["model.parameters()", "the optimizer's"])
@pytest.mark.parametrize("plan", ["stages", "mirror"])
def test_a_norm_over_the_gradients_of_one_rank_is_refused(plan: str, own: bool) -> None:
    def body(comm: Any, module: nn.Module) -> str:
        engine = engine_of(comm, module, plan)
        with pytest.raises(RequestError) as told:
            for step in range(2):
                engine.accumulate(*data(step))
                mine = [p for group in engine.optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(mine if own else module.parameters(), 0.01)
                engine.update()
        return str(told.value)

    (said,) = set(run_copies(network(), 2, body))
    assert "engine.update(max_norm=...)" in said and "on rank 0" in said and "on rank 1" in said


def halved(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def replaced(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def clamped(module: nn.Module) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)


def clipped(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.01)


@pytest.mark.parametrize(
    ("plan", "change"),
    [("stages", halved), ("stages", replaced), ("stages", clamped), ("parts", clipped), ("directions", clipped)],
)
def test_gradients_that_all_ranks_change_alike_equal_one_process(plan: str, change: Any) -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        engine = engine_of(comm, module, plan)
        for step in range(3):
            engine.accumulate(*data(step))
            change(module)
            engine.update()
        return engine.gather_state_dict()

    found = run_copies(network(), 2, body)[0]
    alone = network()
    optimizer = sgd(list(alone.parameters()))
    for step in range(3):
        images, labels = data(step)
        F.cross_entropy(alone(images), labels).backward()
        change(alone)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("release", [False, True])
def test_a_stage_refuses_its_modules_forward_and_warns_of_its_state_dict(release: bool) -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        images, labels = data(0)
        engine = engine_of(comm, module, "stages", release=release)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.state_dict()  # nothing is trained yet
            if not release:
                module(images)
            engine.train_step(images, labels)
            engine.predict(images)
            whole = comm.broadcast_object({n: t.tolist() for n, t in (engine.gather_state_dict() or {}).items()})
            state = {name: torch.tensor(values, dtype=torch.float64) for name, values in whole.items()}
        comm.barrier()
        with pytest.raises(RequestError, match=r"engine\.predict"):
            module(images)
        engine.load_state_dict(state)
        if not release:  # every rank has all of it again
            found, wanted = module(images), engine.predict(images)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
        engine.train_step(images, labels)
        return engine, module

    results = run_copies(network(), 2, body)
    for _, module in results:
        with pytest.warns(UserWarning, match=r"engine\.gather_state_dict\(\), or engine\.save"):
            module.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.state_dict()  # said once


def test_a_second_engine_of_a_stages_module_needs_the_whole_state() -> None:
    def body(comm: Any, module: nn.Module) -> None:
        images, labels = data(0)
        engine = engine_of(comm, module, "stages")
        engine.train_step(images, labels)
        with pytest.raises(RequestError, match=r"a second engine has '(0|4)\.weight' as it was before training; first"):
            engine_of(comm, module, "parts")
        whole = comm.broadcast_object({n: t.tolist() for n, t in (engine.gather_state_dict() or {}).items()})
        module.load_state_dict({name: torch.tensor(values, dtype=torch.float64) for name, values in whole.items()})
        second = engine_of(comm, module, "parts")
        torch.testing.assert_close(second.predict(images), engine.predict(images), rtol=1e-10, atol=1e-11)

    run_copies(network(), 2, body)


@pytest.mark.parametrize("plan", ["alone", "parts", "replicas", "directions"])
def test_ranks_that_have_all_weights_are_left_alone(plan: str) -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        engine = engine_of(comm, module, plan)
        engine.train_step(*data(0))
        return module(data(0)[0]), engine.predict(data(0)[0]), module.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found, wanted, _ in run_copies(network(), PLANS[plan].ranks, body):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def stored_and_loaded(module: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), stored_and_loaded, AveragedModel]
)
def test_a_copy_of_a_stages_module_is_refused_and_warned_of_like_the_module(copied: Any) -> None:
    """Its forward, and an engine made of it, had the old weights of other ranks' stages without a word."""

    def body(comm: Any, module: nn.Module) -> None:
        images, labels = data(0)
        engine = engine_of(comm, module, "stages")
        early = copied(module)
        engine.train_step(images, labels)
        late = copied(module)
        inner = late.module if copied is AveragedModel else late
        early(images)  # a model of its own, as it was before training
        for use in (late, lambda images: engine_of(comm, inner, "parts")):
            with pytest.raises(RequestError, match="as it was before training"):
                use(images)
        whole = comm.broadcast_object({n: t.tolist() for n, t in (engine.gather_state_dict() or {}).items()})
        inner.load_state_dict({name: torch.tensor(values, dtype=torch.float64) for name, values in whole.items()})
        torch.testing.assert_close(late(images), engine.predict(images), rtol=1e-10, atol=1e-11)
        with pytest.raises(RequestError, match=r"engine\.predict"):  # the copy's state is no one else's
            module(images)

    run_copies(network(), 2, body)


def test_a_copy_warns_of_its_state() -> None:
    def body(comm: Any, module: nn.Module) -> nn.Module:
        engine_of(comm, module, "stages").train_step(*data(0))
        return copy.deepcopy(module)

    for other in run_copies(network(), 2, body):
        with pytest.warns(UserWarning, match=r"engine\.gather_state_dict\(\)"):
            other.state_dict()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(make: Any) -> None:
    def body(comm: Any, module: nn.Module) -> None:
        engine = engine_of(comm, module, "alone")
        with pytest.raises(RequestError, match=r"engine\.save\(folder\)"):
            make(engine)

    run_copies(network(), 1, body)
