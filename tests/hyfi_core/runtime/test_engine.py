"""The engine as its users call it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from tests.harness import assert_equal_to_one_process, run_copies


class Small(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.fc(F.relu(self.down(x)).mean((2, 3)))


def batch(seed: int = 0, count: int = 2, size: tuple[int, int] = (17, 22)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, *size, dtype=torch.float64, generator=generator)
    return images, torch.randint(0, 3, (count,), generator=generator)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def test_images_may_be_a_callable_that_is_asked_only_for_this_ranks_box() -> None:
    images, labels = batch()
    asked: list[hyfi_core.Box] = []

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((2, 2),), fused_halo=1)
        engine = hyfi_core.parallelize(module, (2, 3, 17, 22), plan, comm)

        def read(box: hyfi_core.Box) -> torch.Tensor:
            asked.append(box)
            assert box == engine.input_box
            return images[:, :, box.y0 : box.y1, box.x0 : box.x1]

        return engine.accumulate(read, labels), engine.accumulate(images, labels)

    for read_loss, whole_loss in run_copies(Small().double(), 4, body):
        assert read_loss == whole_loss
    assert set(asked) == {
        hyfi_core.Box(0, 9, 0, 12),
        hyfi_core.Box(0, 9, 10, 22),
        hyfi_core.Box(7, 17, 0, 12),
        hyfi_core.Box(7, 17, 10, 22),
    }  # each part and one row or column of halo, so that the first convolution exchanges nothing


def test_gradients_of_two_calls_add_up() -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        module.eval()  # running statistics: the two calls differ in nothing
        plan = hyfi_core.ParallelPlan(grids=((1, 2),))
        engine = hyfi_core.parallelize(module, (2, 3, 17, 22), plan, comm)
        engine.accumulate(*batch())
        once = engine.gather_gradients()
        engine.accumulate(*batch())
        return once, engine.gather_gradients()

    once, twice = run_copies(Small().double(), 2, body)[0]
    assert all(torch.allclose(2 * once[name], twice[name], rtol=1e-12, atol=0) for name in once)


def test_replicas_average() -> None:
    model = Small().double()
    batches = [batch(seed) for seed in (0, 1)]

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((1, 2),), replicas=2)
        engine = hyfi_core.parallelize(module, (2, 3, 17, 22), plan, comm, optimizer=sgd)
        loss = engine.accumulate(*batches[comm.rank // 2])
        return loss, engine.gather_gradients(), engine.gather_state_dict()

    results = run_copies(model, 4, body)
    copies = [copy.deepcopy(model) for _ in batches]
    losses = [F.cross_entropy(m(images), labels) for m, (images, labels) in zip(copies, batches, strict=True)]
    for loss in losses:
        (loss / 2).backward()
    assert {result[0] for result in results} == {results[0][0]}
    assert results[0][0] == pytest.approx(sum(loss.item() for loss in losses) / 2, abs=1e-12)
    for (name, a), b in zip(copies[0].named_parameters(), copies[1].parameters(), strict=True):
        torch.testing.assert_close(results[0][1][name], a.grad + b.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[0][2]["norm.running_mean"], copies[0].norm.running_mean)  # replica 0's


def test_ranks_start_from_rank_0_and_stay_together() -> None:
    def body(comm: Any) -> Any:
        torch.manual_seed(comm.rank)
        plan = hyfi_core.ParallelPlan(grids=((2, 1),))
        module = Small().double()
        engine = hyfi_core.parallelize(module, (2, 3, 17, 22), plan, comm, optimizer=sgd)
        for seed in range(3):
            engine.accumulate(*batch(seed))
            engine.update(max_norm=0.5)
        return module.state_dict()

    first, second = run_ranks(2, body)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_clipping_is_by_the_global_norm() -> None:
    model = Small().double()
    engine = hyfi_core.parallelize(
        model,
        (2, 3, 17, 22),
        hyfi_core.ParallelPlan(grids=((1, 1),)),
        AloneCommunicator(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.accumulate(*batch())
    engine.update(max_norm=1e-3)
    moved = torch.cat([(p.detach() - before[name]).flatten() for name, p in model.named_parameters()])
    assert moved.norm() == pytest.approx(1e-3, rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


def test_predict_leaves_flags_gradients_and_statistics_alone() -> None:
    model = Small().double()
    model.norm.eval()
    plan = hyfi_core.ParallelPlan(grids=((1, 1),))
    engine = hyfi_core.parallelize(model, (2, 3, 17, 22), plan, AloneCommunicator())
    state = engine.gather_state_dict()
    images = batch(count=3)[0]  # another batch size than declared
    logits = engine.predict(images)
    assert state is not None and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training and not model.norm.training
    torch.testing.assert_close(logits, copy.deepcopy(model).eval()(images))


class Resized(nn.Module):
    """Its operators have constants: counts, weights and places, which are copied to the device at first use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = nn.functional.avg_pool2d(self.conv(images), 3, 2, 1, count_include_pad=False)
        x = nn.functional.interpolate(x, size=(9, 14), mode="bicubic")
        x = nn.functional.adaptive_avg_pool2d(nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear"), (2, 3))
        return x.flatten(1)


def test_a_prediction_in_inference_mode_does_not_hinder_training() -> None:
    torch.manual_seed(0)
    model = Resized().double().eval()  # so that training runs the program of prediction
    images, labels = torch.randn(2, 3, 13, 18, dtype=torch.float64), torch.tensor([0, 1])

    def body(comm: Any, module: nn.Module) -> float:
        plan = hyfi_core.ParallelPlan(grids=((1, 2),))
        engine = hyfi_core.parallelize(module, tuple(images.shape), plan, comm)
        with torch.inference_mode():
            engine.predict(images)
        return engine.accumulate(images, labels)

    wanted = nn.functional.cross_entropy(model(images), labels).item()
    assert run_copies(model, 2, body) == pytest.approx([wanted] * 2, abs=1e-12)


@pytest.mark.parametrize(
    ("grid", "cells"), [((1, 1), None), ((2, 2), None), ((1, 2), (2, 1)), ((2, 1), (3, 2)), ((1, 1), (4, 6))]
)
def test_contributions_and_bias_sum_to_the_logit_and_point_to_the_pixels(
    grid: tuple[int, int], cells: tuple[int, int] | None
) -> None:
    torch.manual_seed(0)
    model = Small().double()
    images, _ = batch()

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=(grid,), cells=cells)
        return hyfi_core.parallelize(module, (2, 3, 17, 22), plan, comm).explain(images)

    results = run_copies(model, grid[0] * grid[1], body)
    _, maps, positions = results[0]
    assert maps.shape == (2, 3, 9, 11)
    with torch.no_grad():
        model.eval()
        features = F.relu(model.down(F.relu(model.norm(model.conv(images)))))
        wanted = torch.einsum("bchw,kc->bkhw", features, model.fc.weight) / (9 * 11)
    torch.testing.assert_close(maps, wanted.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(maps.double().sum((2, 3)) + model.fc.bias, model(images), rtol=1e-5, atol=1e-5)
    alone = torch.einsum("bchw,kc->bkhw", features, model.fc.weight) + model.fc.bias[:, None, None]
    torch.testing.assert_close(positions, alone.float().detach(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(result[1], maps) and torch.equal(result[2], positions) for result in results)


def test_a_three_by_three_of_stride_two_sends_one_row_and_a_one_by_one_nothing() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.point, self.down = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.point(x)).mean((2, 3))

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((2, 1),), fused_halo=1)
        engine = hyfi_core.parallelize(module, (1, 3, 16, 10), plan, comm)
        engine.accumulate(torch.randn(1, 3, 16, 10, dtype=torch.float64), torch.tensor([1]))
        return engine.traffic()["halo"]

    sent = run_copies(Windows().double(), 2, body)
    row_bytes = 4 * 10 * 8
    assert sent == [{"messages": 1, "bytes": row_bytes}] * 2  # rank 0 its last row; rank 1 that row's gradient


def test_bfloat16_autocast_stays_near_float32() -> None:
    images, labels = batch(size=(40, 48))

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((1, 2),))
        engine = hyfi_core.parallelize(module, (2, 3, 40, 48), plan, comm, autocast=torch.bfloat16)
        engine.accumulate(images.float(), labels)
        return engine.gather_gradients(), engine.predict(images.float())

    model = Small()
    gradients, logits = run_copies(model, 2, body)[0]
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(images.float()), labels).backward()
    assert logits.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 0.05 * parameter.grad.norm() + 1e-3, name


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_training_in_inference_mode_is_refused(grid: tuple[int, int]) -> None:
    images, labels = batch(size=(40, 48))

    def body(comm: Any, module: nn.Module) -> None:
        engine = hyfi_core.parallelize(module, (2, 3, 40, 48), hyfi_core.ParallelPlan(grids=(grid,)), comm)
        with torch.inference_mode(), pytest.raises(RequestError, match=r"under torch.inference_mode.*leave that mode"):
            engine.accumulate(images.float(), labels)
        engine.accumulate(images.float(), labels)

    run_copies(Small(), grid[1], body)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("call", ["accumulate", "predict"])
def test_a_callers_autocast_is_refused_on_every_rank(call: str, ranks: tuple[int, ...]) -> None:
    """Ranks without pixels, and cells, had float32 where others computed in bfloat16."""
    images, labels = batch(size=(40, 48))

    def body(comm: Any, module: nn.Module) -> torch.Tensor:
        plan = hyfi_core.ParallelPlan(grids=((1, 2),))
        with torch.autocast("cpu", torch.bfloat16, enabled=comm.rank in ranks):
            engine = hyfi_core.parallelize(module, (2, 3, 40, 48), plan, comm)
            given = (images.float(), labels) if call == "accumulate" else (images.float(),)
            words = "pass autocast=torch.bfloat16" if len(ranks) > 1 else "autocast around the call is .* on rank 1"
            with pytest.raises(RequestError, match=words):
                getattr(engine, call)(*given)
        return engine.predict(images.float())  # type: ignore[no-any-return]

    model = Small()
    for logits in run_copies(model, 2, body):
        assert torch.allclose(logits, model.eval()(images.float()), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": hyfi_core.ParallelPlan(grids=((2, 2),))}, "needs 4 ranks, but 1 are running"),
        ({"plan": hyfi_core.ParallelPlan(grids=((1, 1),), microbatches=2), "shape": (3, 3, 8, 8)}, "microbatches=1"),
        ({"shape": (3, 8, 8)}, r"pass \(B, C, H, W\)"),
        ({"model": torch.relu}, "builtin_function_or_method; pass a torch.nn.Module"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], words: str) -> None:
    given = {"model": Small(), "plan": hyfi_core.ParallelPlan(grids=((1, 1),)), "shape": (2, 3, 8, 8)} | change
    with pytest.raises(RequestError, match=words):
        hyfi_core.parallelize(given["model"], given["shape"], given["plan"], AloneCommunicator())


def test_a_loss_that_is_no_number_is_refused() -> None:
    def of_each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels, reduction="none")

    plan = hyfi_core.ParallelPlan(grids=((1, 1),))
    engine = hyfi_core.parallelize(Small(), (2, 3, 8, 8), plan, AloneCommunicator(), loss=of_each)
    with pytest.raises(RequestError, match=r"loss has shape \(2,\); return a scalar tensor"):
        engine.accumulate(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))


def test_an_operator_without_a_rule_is_refused_at_capture_by_name_and_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Renormed())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).mean((2, 3))

    class Renormed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.renorm(x, 2.0, 2, 1.0)

    def body(comm: Any, module: nn.Module) -> None:
        plan = hyfi_core.ParallelPlan(grids=((2, 1),), gather_bytes=0)
        hyfi_core.parallelize(module, (1, 3, 8, 8), plan, comm)

    with pytest.raises(RequestError, match=r"aten\.renorm\.default in module 'inner\.0'"):
        run_copies(Outer(), 2, body)
    alone = hyfi_core.ParallelPlan(grids=((1, 1),))  # one rank takes any operator
    hyfi_core.parallelize(Outer(), (1, 3, 8, 8), alone, AloneCommunicator())


def test_a_model_that_cannot_be_captured_says_why() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3)) if float(x.sum()) > 0 else x.amax((2, 3))

    with pytest.raises(RequestError, match="Branches cannot be captured"):
        hyfi_core.parallelize(Branches(), (1, 3, 8, 8), hyfi_core.ParallelPlan(grids=((1, 1),)), AloneCommunicator())


def test_ranks_with_different_models_are_refused_before_they_talk() -> None:
    def body(comm: Any) -> None:
        module = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1 + comm.rank), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        hyfi_core.parallelize(module, (1, 3, 8, 8), hyfi_core.ParallelPlan(grids=((1, 2),)), comm)

    with pytest.raises(RequestError, match="ranks disagree"):
        run_ranks(2, body)


class KeptMaps(nn.Module):
    """Puts its features aside, as a forward hook does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.kept = nn.Conv2d(3, 4, 1), nn.Linear(4, 2), []
        self.first.register_forward_hook(KEEP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x).mean((2, 3)))


KEPT: list[torch.Tensor] = []


def KEEP(module: nn.Module, given: object, answer: torch.Tensor) -> None:  # noqa: N802
    KEPT.append(answer)


def test_a_loss_that_reads_what_a_hook_kept_is_refused() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, labels) + KEPT[-1].square().mean()

    engine = hyfi_core.parallelize(
        KeptMaps(), (2, 3, 8, 8), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator(), loss=loss, verify=False
    )
    with pytest.raises(RequestError, match=r"loss reads a tensor of shape \(2, 4, 8, 8\) .*KEPT\[-1\]"):
        engine.accumulate(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    KEPT.clear()


@pytest.mark.parametrize(
    ("loss", "words"),
    [(lambda logits, labels: None, "loss has the value None"), (lambda logits, labels: 0.5, "loss has the value 0.5")],
)
def test_a_loss_that_returns_no_tensor_is_refused(loss: Any, words: str) -> None:
    engine = hyfi_core.parallelize(
        nn.Flatten(), (2, 1, 1, 2), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator(), loss=loss
    )
    with pytest.raises(RequestError, match=words):
        engine.accumulate(torch.randn(2, 1, 1, 2), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), "optimizer is a SGD; pass a function"),
        (lambda params: torch.optim.LBFGS(params), "LBFGS evaluates the model several times"),
        (lambda params: None, "optimizer returned NoneType"),
    ],
)
def test_optimisers_that_ranks_cannot_step_together_are_refused(optimizer: Any, words: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(RequestError, match=words):
        hyfi_core.parallelize(
            model, (2, 1, 4, 4), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator(), optimizer=optimizer
        )


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(RequestError, match=r"'0\.weight' of the model is on the meta device"):
        hyfi_core.parallelize(model, (2, 1, 4, 4), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator())


def test_a_model_with_a_scripted_part_is_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Conv2d(1, 2, 1)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(RequestError, match=r"module '0' is scripted \(torch.jit\); pass the torch.nn.Module"):
        hyfi_core.parallelize(model, (2, 1, 4, 4), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator())


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_a_norm_that_is_used_twice_counts_both(grid: tuple[int, int]) -> None:
    class CalledTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, 1, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(self.norm(self.conv(x)))).square().mean((2, 3))

    assert_equal_to_one_process(CalledTwice().double(), (2, 3, 12, 10), grid, classes=3)


@pytest.mark.parametrize("mirror", ["all_reduce", "point_to_point"])
def test_parameters_frozen_and_unfrozen_later_are_trained_as_in_one_process(mirror: Any) -> None:
    plan = hyfi_core.ParallelPlan(
        grids=((1, 1), (1, 1)), cuts=("1",), microbatches=2, schedule="gems_master", mirror=mirror
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = model.double()
    model[0].requires_grad_(False)
    images, labels = torch.randn(4, 3, 9, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)

    def train(net: Any, step: Callable[[], object]) -> None:
        for at in range(5):
            if at == 2:
                net[0].requires_grad_(True)
            if at == 3:
                net[2].requires_grad_(False)
            step()

    def body(comm: Any, net: nn.Module) -> dict[str, torch.Tensor] | None:
        engine = hyfi_core.parallelize(net, (4, 3, 9, 8), plan, comm, optimizer=sgd)
        train(net, lambda: engine.train_step(images, labels))
        return engine.gather_state_dict()

    found = run_copies(model, plan.ranks, body)[0]
    optimizer = sgd(model.parameters())

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    train(model, step)
    assert all(torch.allclose(found[name], value, rtol=1e-10) for name, value in model.state_dict().items())
