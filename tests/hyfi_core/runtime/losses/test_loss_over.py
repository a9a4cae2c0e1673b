"""What a loss is computed over, what that costs, and which losses are refused, the same on every rank."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.cells import pager, paging
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.runtime.losses import known_means
from hyfi_core.runtime.losses.training_loss import TrainingLoss
from hyfi_core.runtime.settings import EngineSettings
from tests.harness import run_copies
from tests.hyfi_core.runtime.losses.reference import (
    CUT,
    LOSSES,
    ONE,
    PLANS,
    SIZE_PX,
    Net,
    assert_loss_of_whole_batch,
    classes,
    contrastive,
    cox,
    survival,
)

STAGES = PLANS["stages 1f1b"]
REPLICAS = PLANS["replicas"]


class Both(NamedTuple):
    """Outputs of ``TwoHeads``."""

    logits: torch.Tensor
    features: torch.Tensor


class TwoHeads(Net):
    """Returns logits and features."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        features = (self.second(y) + self.side(y)).mean((2, 3))
        return Both(self.head(features), features)


class Powered(nn.Module):
    """A weight with spectral norm, whose buffers change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Conv2d(3, 4, 3, 2, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)).mean((2, 3)))


class Dropping(nn.Module):
    """Dropout of pixels and features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, 2, 1)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.drop(torch.tanh(self.first(x))).mean((2, 3))))


def step(plan: ParallelPlan, labels: Any = None, model: type[nn.Module] = Net, batch: int = 4, **settings: Any) -> Any:
    """Return each rank's loss and gradients of one step, or its error."""
    torch.manual_seed(0)
    network = model().double()
    images = torch.randn(batch, 3, *SIZE_PX, dtype=torch.float64)
    labels = torch.arange(batch) % 3 if labels is None else labels

    def body(comm: Any, module: nn.Module) -> Any:
        try:
            engine = hyfi_core.parallelize(module, tuple(images.shape), plan, comm, **settings)  # type: ignore[arg-type]
            return engine.accumulate(images, labels), engine.gather_gradients(), engine
        except RequestError as error:
            return str(error)

    return run_copies(network, plan.ranks, body)


def both_logits(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return contrastive(out.features, labels) + F.cross_entropy(out.logits, labels)


@pytest.mark.parametrize("plan", ["2 micro-batches", "stages gpipe", "replicas of stages", "chimera"])
def test_losses_of_whole_structures_of_outputs(plan: str) -> None:
    """All leaves of a tuple are gathered."""
    assert_loss_of_whole_batch(both_logits, classes, PLANS[plan], model=TwoHeads())


@pytest.mark.parametrize("plan", ["2 micro-batches", "stages 1f1b", "replicas, micro-batches"])
def test_output_picks_the_logits_of_the_whole_batch(plan: str) -> None:
    assert_loss_of_whole_batch(contrastive, classes, PLANS[plan], model=TwoHeads(), output=lambda out: out.logits * 2.0)


@pytest.mark.parametrize("plan", ["2 micro-batches", "stages 1f1b", "4 micro-batches"])
def test_buffers_change_once_where_forwards_run_twice(plan: str) -> None:
    assert_loss_of_whole_batch(contrastive, classes, PLANS[plan], model=Powered())


@pytest.mark.parametrize("plan", [STAGES, PLANS["chimera"], PLANS["4 micro-batches"]])
def test_both_forwards_draw_the_same_numbers(plan: ParallelPlan) -> None:
    """As the only forward of GPipe does."""
    of_gpipe = ParallelPlan(ONE, microbatches=4, schedule="gpipe")
    wanted = step(of_gpipe, model=Dropping, loss=contrastive)[0]
    found = step(plan, model=Dropping, loss=contrastive)[0]
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)


def test_calls_add_up_until_the_update() -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (4, 3, *SIZE_PX), PLANS["2 micro-batches"], comm, loss=contrastive)
        images, labels = torch.ones(4, 3, *SIZE_PX, dtype=torch.float64).cumsum(0).sin(), torch.arange(4) % 3
        engine.accumulate(images, labels)
        once = engine.gather_gradients()
        engine.accumulate(images, labels)
        return once, engine.gather_gradients()

    once, twice = run_copies(Net().double(), 1, body)[0]
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", [PLANS["2 micro-batches"], STAGES, REPLICAS])
@pytest.mark.parametrize("name", ["class_weights", "sum", "contrastive"])
def test_a_loss_that_is_no_mean_is_refused_for_micro_batches(plan: ParallelPlan, name: str) -> None:
    found = step(plan, loss=LOSSES[name][0], loss_over="microbatch")
    assert len(set(found)) == 1, "every rank refuses alike"
    assert 'loss_over is "microbatch", but the loss is not a mean' in found[0]


def test_labels_that_show_it_later_are_refused_then() -> None:
    """Class weights with one class in a batch are a mean; with two they are not."""
    loss = LOSSES["class_weights"][0]
    plan = PLANS["2 micro-batches"]
    torch.manual_seed(0)
    engine = hyfi_core.parallelize(
        Net().double(), (4, 3, *SIZE_PX), plan, AloneCommunicator(), loss=loss, loss_over="microbatch", verify=False
    )
    images = torch.randn(4, 3, *SIZE_PX, dtype=torch.float64)
    engine.accumulate(images, torch.tensor([1, 1, 1, 1]))
    for _ in range(2):  # refused again
        with pytest.raises(RequestError, match="not a mean of terms of single samples"):
            engine.accumulate(images, torch.tensor([0, 1, 2, 1]))


@pytest.mark.parametrize("over", ["auto", "microbatch"])
def test_settings_of_a_loss_may_change_between_steps(over: Any) -> None:
    """A mean over samples gets class weights: it is none any more."""
    loss, images = nn.CrossEntropyLoss(), torch.randn(4, 3, *SIZE_PX, dtype=torch.float64)
    model, labels, plan = Net().double(), torch.tensor([0, 1, 2, 1]), PLANS["2 micro-batches"]
    engine = hyfi_core.parallelize(
        model, (4, 3, *SIZE_PX), plan, AloneCommunicator(), loss=loss, loss_over=over, verify=False
    )
    engine.accumulate(images, labels)
    loss.weight = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)
    if over == "microbatch":
        with pytest.raises(RequestError, match="not a mean of terms of single samples"):
            engine.accumulate(images, labels)
    else:
        logits = torch.cat([model(part) for part in images.chunk(2)])
        assert engine.accumulate(images, labels) == pytest.approx(loss(logits, labels).item(), rel=1e-12)


def test_labels_of_other_replicas_are_compared_too() -> None:
    """Each replica has one class, and one image."""
    loss = LOSSES["class_weights"][0]

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (1, 3, *SIZE_PX), REPLICAS, comm, loss=loss, loss_over="microbatch")
        images = torch.ones(1, 3, *SIZE_PX, dtype=torch.float64)
        with pytest.raises(RequestError, match="not a mean of terms of single samples"):
            engine.accumulate(images, torch.tensor([comm.rank]))

    run_copies(Net().double(), 2, body)


@pytest.mark.parametrize("name", ["cross_entropy", "smoothing", "pos_weight", "mse"])
@pytest.mark.parametrize("plan", ["stages 1f1b", "replicas, micro-batches"])
def test_means_of_samples_are_computed_for_each_micro_batch(name: str, plan: str) -> None:
    """They pass the check, and by default no forward runs twice."""
    loss, labels = LOSSES[name]
    assert_loss_of_whole_batch(loss, labels, PLANS[plan], loss_over="microbatch")
    found = step(PLANS[plan], labels(4, torch.Generator().manual_seed(1)), loss=loss)
    forwards = [action for action, _, _ in found[0][2].events if action.verb == "F"]
    assert len(forwards) == len(set(forwards))


def test_a_second_forward_is_described() -> None:
    lines = assert_loss_of_whole_batch(cox, survival, STAGES)
    assert all("every forward runs twice" in text for text in lines)
    lines = assert_loss_of_whole_batch(cox, survival, PLANS["stages gpipe"])
    assert not any("twice" in text for text in lines)
    found = step(STAGES, loss=contrastive)
    forwards = [action for action, _, _ in found[0][2].events if action.verb == "F"]
    assert len(forwards) == 2 * len(set(forwards))


def test_ignored_labels_of_the_default_loss_count_over_the_whole_batch() -> None:
    """-100 is ignored by default, in one micro-batch or replica only."""
    for plan in ("stages 1f1b", "replicas", "shares"):
        assert_loss_of_whole_batch(F.cross_entropy, with_ignored, PLANS[plan])


def with_ignored(count: int, generator: torch.Generator) -> torch.Tensor:
    labels = classes(count, generator)
    labels[-1] = -100
    return labels


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, labels: (F.cross_entropy(out, labels), 1), "the loss has the type tuple"),
        (nn.CrossEntropyLoss(reduction="none"), r"the loss has shape \(4,\)"),
        (lambda out, labels: F.cross_entropy(out, labels).item(), "the loss has the value"),
        (lambda out, labels: F.cross_entropy(out.detach(), labels), "does not depend on the model's output"),
    ],
    ids=["tuple", "of each sample", "number", "detached"],
)
@pytest.mark.parametrize("plan", ["alone", "stages", "stages 1f1b", "1 x 2", "2 micro-batches"])
def test_what_is_no_scalar_is_refused_on_every_rank(loss: Any, words: str, plan: str) -> None:
    found = step(PLANS[plan], loss=loss)
    assert len(set(map(str, found))) == 1
    assert isinstance(found[0], str), "no rank may accept it"
    assert re.search(words, found[0]), found[0]


def test_replicas_of_different_numbers_of_images_are_refused() -> None:
    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (2, 3, *SIZE_PX), REPLICAS, comm)
        count = 2 - comm.rank
        images = torch.ones(count, 3, *SIZE_PX, dtype=torch.float64)
        with pytest.raises(RequestError, match=r"number of images .* is 2 on rank 0; 1 on rank 1") as refused:
            engine.accumulate(images, torch.zeros(count, dtype=torch.int64))
        engine.accumulate(images[:1], torch.zeros(1, dtype=torch.int64))
        return str(refused.value)

    assert len(set(run_copies(Net().double(), 2, body))) == 1


@pytest.mark.parametrize("loss", [F.cross_entropy, contrastive, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 5]))])
def test_under_autocast_the_loss_is_that_of_plain_pytorch(loss: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    model, images, labels = Net(), torch.randn(4, 3, *SIZE_PX), torch.tensor([0, 1, 2, 0])
    with torch.autocast("cpu", torch.bfloat16):
        wanted = loss(model(images), labels)
    engine = hyfi_core.parallelize(
        model,
        tuple(images.shape),
        ParallelPlan(ONE),
        AloneCommunicator(),
        loss=loss,
        autocast=torch.bfloat16,  # type: ignore[arg-type]
    )
    assert engine.accumulate(images, labels) == wanted.item()


def test_training_in_float16_is_refused_with_the_remedy() -> None:
    plan, given = ParallelPlan(ONE), {"autocast": torch.float16, "verify": False}
    with pytest.raises(RequestError, match=r"training needs autocast=torch\.bfloat16"):
        hyfi_core.parallelize(
            Net(), (2, 3, *SIZE_PX), plan, AloneCommunicator(), optimizer=lambda p: torch.optim.SGD(p, 0.1), **given
        )
    engine = hyfi_core.parallelize(Net(), (2, 3, *SIZE_PX), plan, AloneCommunicator(), **given)
    with pytest.raises(RequestError, match=r"training needs autocast=torch\.bfloat16"):
        engine.accumulate(torch.ones(2, 3, *SIZE_PX), torch.zeros(2, dtype=torch.int64))


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(RequestError, match="loss_over is 'mean'; pass 'auto', 'batch' or 'microbatch'"):
        hyfi_core.parallelize(Net(), (2, 3, *SIZE_PX), ParallelPlan(ONE), AloneCommunicator(), loss_over="mean")  # type: ignore[arg-type]


class Summed(nn.Module):
    """A scalar beside the logits, as some models return a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.net(x)
        return logits, logits.square().mean()


def test_outputs_without_a_dim_for_the_batch() -> None:
    """There is no loss over the whole batch; over micro-batches there is."""
    loss = lambda out, labels: F.cross_entropy(out[0], labels) + 0.1 * out[1]  # noqa: E731
    found = step(PLANS["2 micro-batches"], model=Summed, loss=loss)
    assert "without a dim for the batch" in found[0]
    assert not isinstance(step(PLANS["2 micro-batches"], model=Summed, loss=loss, loss_over="microbatch")[0], str)


def test_a_loss_is_called_once_for_the_whole_batch() -> None:
    """So that one with a state of its own is what it is in one process."""
    calls = []

    def counted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(len(labels))
        return F.cross_entropy(logits, labels)

    step(PLANS["2 micro-batches"], loss=counted)
    assert calls == [4]


def test_a_penalty_on_weights_counts_once() -> None:
    """A loss may read weights of its stage; they get its gradient once, whatever the replicas and directions."""
    model = Net().double()

    def body(comm: Any, module: Any) -> Any:
        loss = lambda out, labels: F.cross_entropy(out, labels) + module.head.weight.square().sum()  # noqa: E731
        engine = hyfi_core.parallelize(module, (2, 3, *SIZE_PX), plan, comm, loss=loss)
        value = engine.accumulate(torch.ones(2, 3, *SIZE_PX, dtype=torch.float64), torch.tensor([0, 1]))
        return value, engine.gather_gradients()

    plan = ParallelPlan(ONE)
    wanted = run_copies(model, 1, body)[0]
    for plan in (REPLICAS, ParallelPlan(**CUT, replicas=2), ParallelPlan(ONE, microbatches=2)):
        found = run_copies(model, plan.ranks, body)[0]
        assert found[0] == pytest.approx(wanted[0], rel=1e-12)
        for name in ("head.weight", "head.bias"):
            torch.testing.assert_close(found[1][name], wanted[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "gems_mast"])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_maps_may_be_spilled_between_both_forwards(
    schedule: Any, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every map is a page, and fewer fit than a step has."""
    monkeypatch.setattr(pager, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(paging, "page_limit", lambda *given: 12_000)
    spill = "memory" if where == "memory" else str(tmp_path)
    plan = ParallelPlan(ONE, cells=(2, 2), spill=spill, microbatches=2, schedule=schedule)
    assert_loss_of_whole_batch(contrastive, classes, plan)


@pytest.mark.parametrize("kind", [*known_means._MODULES, *known_means._FUNCTIONS], ids=lambda kind: kind.__name__)
def test_losses_that_are_known_means_are_seen_to_be_on_random_logits(kind: Any) -> None:
    state = torch.get_rng_state()
    assert _auto(kind() if isinstance(kind, type) else kind)._confirmed_mean() is not None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(ignore_index=0), nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 6.0))]
)
def test_settings_do_not_disturb_the_trial(loss: nn.Module) -> None:
    assert _auto(loss)._confirmed_mean() is not None


@pytest.mark.parametrize("place", [(nn.CrossEntropyLoss, "forward"), (F, "cross_entropy")], ids=["class", "function"])
def test_a_known_mean_that_somebody_has_patched_is_computed_over_the_batch(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = F.cross_entropy

    def of_batch(*given: Any, **settings: Any) -> torch.Tensor:
        logits, labels = given[-2:]
        return plain(logits - logits.mean(0), labels)

    monkeypatch.setattr(*place, of_batch)
    assert _auto(nn.CrossEntropyLoss())._confirmed_mean() is None
    images, labels = torch.randn(4, 3, *SIZE_PX, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    torch.manual_seed(0)
    model = Net().double()
    wanted = float(of_batch(torch.cat([model(part) for part in images.chunk(2)]), labels))
    plan = ParallelPlan(((1, 1),), microbatches=2)
    engine = hyfi_core.parallelize(model, (4, 3, *SIZE_PX), plan, AloneCommunicator(), loss=nn.CrossEntropyLoss())
    assert engine.accumulate(images, labels) == pytest.approx(wanted, abs=1e-12)


def _auto(loss: Any) -> TrainingLoss:
    subject: Any = types.SimpleNamespace(settings=EngineSettings(loss=loss), device=torch.device("cpu"))
    nothing: Any = None
    return TrainingLoss(subject, ParallelPlan(((1, 1),), microbatches=2), nothing)
