"""Ranks that were given different things all refuse, and say what differs on which ranks."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from tests.harness import run_copies

SHAPE = (2, 3, 16, 24)


def network(width: int = 4) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, width, 3, 2, 1), torch.nn.BatchNorm2d(width), torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(*layers, torch.nn.Flatten())


def refusals(ranks: int, body: Callable[[Communicator], Any]) -> set[str]:
    """Return what the ranks say, each of which must refuse."""

    def refused(comm: Communicator) -> str:
        with pytest.raises(RequestError) as told:
            body(comm)
        return str(told.value)

    return set(run_ranks(ranks, refused))


def made(comm: Communicator, **given: Any) -> hyfi_core.Engine:
    """Make an engine with something special on rank 1."""
    special = given if comm.rank == 1 else {}
    model = special.get("model", network())
    plan = special.get("plan", hyfi_core.ParallelPlan(grids=((1, comm.size),)))
    settings = {key: value for key, value in special.items() if key in ("autocast", "optimizer")}
    return hyfi_core.parallelize(model, special.get("shape", SHAPE), plan, comm, **settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"plan": hyfi_core.ParallelPlan(grids=((2, 1),))}, r"plan.grids is .*1, 2.* on rank 0; .*2, 1.* on rank 1"),
        ({"shape": (2, 3, 16, 26)}, r"shape is \(2, 3, 16, 24\) on rank 0; \(2, 3, 16, 26\) on rank 1"),
        ({"shape": (4, 3, 16, 24)}, r"shape is \(2, 3, 16, 24\) on rank 0; \(4, 3, 16, 24\) on rank 1"),
        ({"model": network(8)}, r"0.weight is \(4, 3, 3, 3\) torch.float32 on cpu on rank 0; \(8, "),
        ({"model": network().double()}, "0.weight is .*float32 on cpu on rank 0; .*float64"),
        ({"model": network().eval()}, "the model.training is True on rank 0; False on rank 1"),
        ({"model": network().requires_grad_(False)}, "0.weight.requires_grad is True on rank 0; False on rank 1"),
        ({"model": torch.nn.Sequential(*network(), torch.nn.ReLU())}, "4.training is not given on rank 0"),
        ({"autocast": torch.bfloat16}, "autocast is None on rank 0; torch.bfloat16 on rank 1"),
        ({"optimizer": torch.optim.SGD}, "optimizer is none on rank 0; given on rank 1"),
        ({"plan": hyfi_core.ParallelPlan(grids=((1, 3),))}, "the plan needs 3 ranks, but 2 are running"),
        ({"shape": (16, 24)}, r"shape is \(16, 24\); pass"),
    ],
)
def test_what_one_rank_is_given_differently_is_named(given: dict[str, Any], words: str) -> None:
    (said,) = refusals(2, lambda comm: made(comm, **given))
    assert re.search(words, said), said


def weighted(o: torch.Tensor, y: torch.Tensor, factors: list[float]) -> torch.Tensor:
    return F.cross_entropy(o, y) * factors[0]


def closed(factor: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda o, y: weighted(o, y, [factor])


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([torch.nn.CrossEntropyLoss(torch.tensor([1.0, w])) for w in (1, 2)], "weight=.*sums 2, 3.* on rank 0; .*3, 5"),
        ([torch.nn.CrossEntropyLoss(label_smoothing=s) for s in (0.0, 0.1)], "label_smoothing=0.0 on rank 0; .*0.1 on"),
        ([closed(1.0), closed(2.0)], "with factor=1.0 on rank 0; .*with factor=2.0 on rank 1"),
        ([functools.partial(weighted, factors=[w]) for w in (1.0, 2.0)], "1.0.* on rank 0; .*2.0.* on rank 1"),
    ],
)
def test_losses_that_hold_other_values_are_named(losses: list[Any], words: str) -> None:
    def body(comm: Communicator) -> None:
        hyfi_core.parallelize(network(), SHAPE, plan_of(comm), comm, loss=losses[comm.rank])

    (said,) = refusals(2, body)
    assert re.search(f"loss is .*{words}", said), said


def test_a_loss_that_changes_on_one_rank_is_named() -> None:
    def body(comm: Communicator) -> None:
        loss = torch.nn.CrossEntropyLoss()
        engine = hyfi_core.parallelize(network(), SHAPE, plan_of(comm), comm, loss=loss)
        for smoothing in (0.0, 0.1 * comm.rank):
            loss.label_smoothing = smoothing
            engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))

    (said,) = refusals(2, body)
    assert re.search("the loss is .*label_smoothing=0.0 on rank 0; .*label_smoothing=0.1 on rank 1", said), said


def test_an_operator_with_other_settings_is_named() -> None:
    def body(comm: Communicator) -> None:
        model = torch.nn.Sequential(*network()[:2], torch.nn.Conv2d(4, 4, 3, 1, 1 + comm.rank, 1 + comm.rank))
        hyfi_core.parallelize(torch.nn.Sequential(*model, *network()[2:]), SHAPE, plan_of(comm), comm)

    (said,) = refusals(2, body)
    assert re.search(r"aten.conv2d.default\(.*\[1, 1\]\) of 2 on rank 0; .*\[2, 2\]\) of 2 on rank 1", said), said


def plan_of(comm: Communicator) -> hyfi_core.ParallelPlan:
    return hyfi_core.ParallelPlan(grids=((1, comm.size),))


def test_weights_are_taken_from_the_first_rank_after_all_else_is_compared() -> None:
    def body(comm: Communicator) -> tuple[bool, bool]:
        model = network(4 + 4 * (comm.rank == 1))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RequestError):
            made(comm, model=model)
        return all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)), True

    assert run_ranks(2, body) == [(True, True)] * 2


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("call", ["accumulate", "predict"])
def test_flags_and_shapes_are_compared_at_every_call(call: str, replicas: int) -> None:
    def engine_of(comm: Communicator, images: torch.Tensor, change: Callable[[torch.nn.Module], Any]) -> None:
        model = network()
        plan = hyfi_core.ParallelPlan(grids=((1, 2),), replicas=replicas)
        engine = hyfi_core.parallelize(model, SHAPE, plan, comm)
        engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))  # the program is there: nothing is captured again
        if comm.rank % 2:
            change(model)
            engine.accumulate(images, torch.tensor([0, 1])) if call == "accumulate" else engine.predict(images)
        else:
            given = torch.zeros(SHAPE)
            engine.accumulate(given, torch.tensor([0, 1])) if call == "accumulate" else engine.predict(given)

    odd = "1" if replicas == 1 else r"s 1, 3"
    if call == "accumulate":
        (said,) = refusals(2 * replicas, lambda c: engine_of(c, torch.zeros(SHAPE), lambda model: model.eval()))
        assert f"the model.training is True on rank{' 0' if replicas == 1 else 's 0, 2'}; False on rank" in said
        assert odd in said
    (said,) = refusals(2 * replicas, lambda c: engine_of(c, torch.zeros(2, 3, 16, 20), lambda model: None))
    assert "the images' shape is (2, 3, 16, 24) on rank 0; (2, 3, 16, 20) on rank 1" in said


class Gained(torch.nn.Module):
    """A network with a number that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.gain = network(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x) * self.gain


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_attribute_that_changes_on_one_rank_is_named(replicas: int) -> None:
    plan = hyfi_core.ParallelPlan(grids=((1, 2 // replicas),), replicas=replicas)

    def body(comm: Communicator) -> None:
        model = Gained()
        engine = hyfi_core.parallelize(model, SHAPE, plan, comm)
        engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))
        model.gain = 1.0 + comm.rank
        engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))

    (said,) = refusals(2, body)
    assert "gain (changed since the last call) is not given on rank 0; 2.0 on rank 1" in said


def test_an_attribute_that_goes_back_on_one_rank_is_named() -> None:
    def body(comm: Communicator) -> None:
        model = Gained()
        engine = hyfi_core.parallelize(model, SHAPE, hyfi_core.ParallelPlan(grids=((1, 2),)), comm)
        for gain in (2.0, 1.0 + comm.rank):  # both are captured by then
            model.gain = gain
            engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))

    (said,) = refusals(2, body)
    assert "gain (changed since the last call) is 1.0 on rank 0; not given on rank 1" in said


class Scaled(torch.nn.Module):
    """Takes bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x.double() / 255)


@pytest.mark.parametrize("grid", [(1, 1), (2, 1)])
def test_a_model_that_scales_bytes_itself_equals_one_process(grid: tuple[int, int]) -> None:
    images, labels = torch.randint(0, 255, SHAPE, dtype=torch.uint8), torch.tensor([0, 1])
    reference = Scaled()
    wanted = torch.nn.functional.cross_entropy(reference(images), labels)
    copies = [copy.deepcopy(reference) for _ in range(2)]
    wanted.backward()
    plan = hyfi_core.ParallelPlan(grids=(grid,))

    def body(comm: Communicator) -> None:
        engine = hyfi_core.parallelize(copies[comm.rank], SHAPE, plan, comm, image_dtype=torch.uint8)
        assert abs(engine.accumulate(images, labels) - wanted.item()) < 1e-12
        assert (
            abs(engine.accumulate(lambda box: images[:, :, box.y0 : box.y1, box.x0 : box.x1], labels) - float(wanted))
            < 1.0
        )
        gradients = engine.gather_gradients() or {}
        for name, p in reference.named_parameters() if comm.rank == 0 else ():
            torch.testing.assert_close(gradients[name], 2 * p.grad, rtol=1e-9, atol=1e-10)
        with pytest.raises(RequestError, match="float32, but the engine was created with image_dtype"):
            engine.predict(images.float())

    run_ranks(plan.ranks, body)


def test_another_call_is_another_thing() -> None:
    def body(comm: Communicator) -> None:
        engine = made(comm)
        if comm.rank:
            engine.predict(torch.zeros(SHAPE))
        else:
            engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))

    (said,) = refusals(2, body)
    assert "the call is training on rank 0; predict on rank 1" in said


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (torch.zeros(SHAPE), torch.tensor([1]), r"labels have shape \(1,\), but the batch has 2 images; pass 2 labels"),
        (torch.zeros(SHAPE), torch.tensor(1), r"labels have shape \(\), but the batch has 2 images"),
        (torch.zeros(SHAPE), [0, 1], "labels are a list; pass a tensor"),
        (torch.zeros(SHAPE, dtype=torch.uint8), torch.tensor([0, 1]), "the batch is torch.uint8"),
        (
            lambda box: torch.zeros(2, 3, *box.shape, dtype=torch.uint8),
            torch.tensor([0, 1]),
            r"what images\(.*\) returned is torch.uint8; the engine expects floating-point images",
        ),
        (
            lambda box: torch.zeros(2, 1, *box.shape),
            torch.tensor([0, 1]),
            r"returned shape \(2, 1, 16, 24\); \(2, 3, 16, 24\) was requested",
        ),
        (
            lambda box: torch.zeros(1, 3, *box.shape),
            torch.tensor([0, 1]),
            r"returned shape \(1, 3, 16, 24\); \(2, 3, 16, 24\) was requested",
        ),
        (
            lambda box: torch.zeros(3, 16, 24),
            torch.tensor([0, 1]),
            r"returned shape \(.*\); \(2, 3, 16, 24\) was "
            r"requested",
        ),
    ],
)
def test_images_and_labels_are_checked_on_arrival(images: Any, labels: Any, words: str) -> None:
    engine = hyfi_core.parallelize(network(), SHAPE, hyfi_core.ParallelPlan(grids=((1, 1),)), hyfi_core.init())
    with pytest.raises(RequestError, match=words):
        engine.accumulate(images, labels)


def shifted(answer: torch.Tensor) -> torch.Tensor:
    return answer + 1


def stepped(comm: Communicator, case: str) -> None:
    """Train two steps, with something special on rank 1."""
    special = comm.rank == 1
    plan = hyfi_core.ParallelPlan(grids=((1, comm.size),))
    engine = hyfi_core.parallelize(
        network(), SHAPE, plan, comm, verify=False,
        optimizer=torch.optim.Adam if case == "betas" or (special and case == "kind") else torch.optim.SGD,
        output=shifted if special and case == "output" else None,
        loss=(lambda a, y: 2 * a.sum()) if special and case == "loss" else torch.nn.functional.cross_entropy,
    )  # fmt: skip
    for step in range(2):
        engine.accumulate(torch.ones(SHAPE), torch.tensor([0, 1 - (special and case == "labels")]))
        if not (special and case == "update"):
            engine.update(max_norm=1e-3 if special and case == "max_norm" else None)
        if special and case == "lr" and step == 0:
            engine.optimizer.param_groups[0]["lr"] = 0.5
        if special and case == "betas" and step == 0:
            engine.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("labels", r"labels is \(2,\) 0, 1 .* on rank 0; \(2,\) 0, 0 .* on rank 1"),
        ("loss", "loss is cross_entropy .* on rank 0; .*lambda.* on rank 1"),
        ("output", "output is none on rank 0; shifted .* on rank 1"),
        ("kind", r"the optimizer is SGD\(.* on rank 0; Adam\("),
        ("lr", r"lr=0.001.* on rank 0; .*lr=0.5.* on rank 1"),
        ("betas", r"betas=\(0.9, 0.999\).* on rank 0; .*betas=\(0.5, 0.9\).* on rank 1"),
        ("update", "1 updates.* on rank 0; .* 0 updates.* on rank 1"),
        ("max_norm", "max_norm=None on rank 0; .*max_norm=0.001 on rank 1"),
    ],
)
def test_steps_that_differ_are_named(case: str, words: str) -> None:
    (said,) = refusals(2, lambda comm: stepped(comm, case))
    assert re.search(words, said), said


class Noted(torch.nn.Module):
    """A loss that keeps its last terms, for a log, and weighs classes by how often it has seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.nn.Buffer(torch.ones(4))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.counts += torch.bincount(labels, minlength=4)
        self.terms = torch.nn.functional.cross_entropy(logits, labels, 1 / self.counts, reduction="none")
        return self.terms.mean()


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_loss_keeps_values_on_the_ranks_that_compute_it(schedule: str) -> None:
    labels = torch.tensor([0, 1])
    torch.manual_seed(0)
    images = torch.randn(SHAPE)

    def body(comm: Communicator, model: torch.nn.Module) -> list[float]:
        stages = ((1, 1),) * comm.size
        cuts = ("0",) if comm.size > 1 else ()
        plan = hyfi_core.ParallelPlan(stages, cuts, microbatches=2, schedule=schedule if cuts else "1f1b")  # type: ignore[arg-type]
        engine = hyfi_core.parallelize(model, SHAPE, plan, comm, loss=Noted())
        return [engine.accumulate(images, labels) for _ in range(3)]

    model = network()
    wanted = run_copies(model, 1, body)[0]
    for losses in run_copies(model, 2, body):
        assert losses == pytest.approx(wanted)


def test_a_loss_that_changes_on_a_rank_of_the_last_stage_is_named() -> None:
    def body(comm: Communicator) -> None:
        loss = torch.nn.CrossEntropyLoss()
        plan = hyfi_core.ParallelPlan(((1, 1), (1, 2)), ("0",))
        engine = hyfi_core.parallelize(network(), SHAPE, plan, comm, loss=loss)
        for smoothing in (0.0, 0.1 * comm.rank):
            loss.label_smoothing = smoothing
            engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))

    (said,) = refusals(3, body)
    assert re.search("the loss is .*label_smoothing=0.1 on rank 1; .*label_smoothing=0.2 on rank 2", said), said
