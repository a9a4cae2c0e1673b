"""Losses and metrics of the user: the same on any plan, recorded, and refused early where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from tests.workflows.archive import make_config
from tests.workflows.runs import losses, run_here, run_on
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.tasks.own import check_own, own_numbers
from workflows.tasks.regression import Regression
from workflows.tasks.task import make_loss
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
HERE = "tests.workflows.tasks.test_own"


def spread(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that is no mean over samples: of all pairs of samples of two classes, how far their logits are apart."""
    margin = outputs[:, 1] - outputs[:, 0]
    return (
        torch.nn.functional.softplus(margin[labels == 0][:, None] - margin[labels == 1][None]).sum()
        + (margin**2).mean()
    )


def furthest(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    return float(outputs.abs().max())


def of_each(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs[:, 0]


def apart(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1.0)


def constant(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1.0, requires_grad=True)


def squeezed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One number for a batch of one slide only."""
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none").squeeze()


def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As most losses of one's own are: PyTorch refuses float64 outputs beside its weights, which are float32."""
    return torch.nn.functional.cross_entropy(outputs, labels, weight=torch.tensor([1.0, 2.0]))


class Scaled(torch.nn.Module):
    """A loss with a scale that should be learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs * self.scale, labels)


scaled = Scaled()


def two_numbers(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    return 1.0, 2.0


def fails(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise ValueError("of course")


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    return 0.0


def config_of(folder: Path, store: Path) -> Path:
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    data = {"loss": f"{HERE}:spread", "class_weights": "none", "augment": False}
    validation = {"metrics": [f"{HERE}:furthest"], "metric": "furthest", "every_steps": 2}
    run = {"steps": 2, "precision": "float64"}
    return make_config(folder, store, data=data, model=model, validation=validation, run=run)


@pytest.mark.parametrize("plan", [["grids=[[1, 1], [1, 1]]", "microbatches=2"], ["replicas=2"]])
def test_a_loss_of_the_whole_batch_is_that_of_one_process(tmp_path: Path, store: Path, plan: list[str]) -> None:
    (tmp_path / "one").mkdir()
    config = config_of(tmp_path / "one", store)
    assert run_here(config, "data.batch_size=4") == 0
    (record,) = [one for one in read_metrics(tmp_path / "one/run/metrics.jsonl") if one["kind"] == "validation"]
    assert record["furthest"] > 0 and record["intervals"]["furthest"] is record["intervals"]["loss"] is None
    assert record["case"]["furthest"] > 0 and record["auroc"] is not None
    overrides = ["data.batch_size=4", *(f"plan.{key}" for key in plan), f"run.dir={tmp_path / 'many'}"]
    assert run_on(2, config, *overrides) == [0, 0]
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one/run"), rel=1e-8)
    best = tmp_path / "one/run/checkpoints/best"
    own = {"loss": f"{HERE}:spread", "metrics": [f"{HERE}:furthest"]}
    assert read_model_json(best)["own"] == own
    assert validate.run(validate.EvaluationRequest(best, store, split="val", as_json=True)) == 0


def test_a_loss_with_tensors_of_its_own_is_validated(tmp_path: Path, store: Path) -> None:
    """The run ended at its first validation, which gives outputs in float64."""
    assert run_here(config_of(tmp_path, store), f"data.loss={HERE}:weighted", "run.precision=float32") == 0
    (record,) = [one for one in read_metrics(tmp_path / "run/metrics.jsonl") if one["kind"] == "validation"]
    assert record["loss"] > 0
    outputs, labels = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 1, 0])
    numbers = own_numbers(f"{HERE}:weighted", (), outputs.double(), labels)
    assert numbers == {"loss": pytest.approx(float(weighted(outputs, labels)))}
    with pytest.raises(RequestError, match=r"squeezed': returns a tensor of shape \(3,\) without gradient"):
        own_numbers(f"{HERE}:squeezed", (), outputs.double(), labels)
    assert own_numbers("", (f"{HERE}:undefined",), outputs, labels) == {"undefined": None}


def undefined(outputs: torch.Tensor, labels: torch.Tensor) -> None:
    return None


def error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - labels).abs().mean()


def test_a_predicted_number_is_in_the_units_of_its_labels() -> None:
    task = Regression(("age",), 50.0, 10.0, own_loss=f"{HERE}:error", own_metrics=(f"{HERE}:error",))
    outputs, labels = torch.tensor([[0.5], [-1.0]], dtype=torch.float64), torch.tensor([55.0, 42.0]).double()
    assert float(make_loss(task, 1)(outputs, labels)) == 1.0  # 55 and 40
    metrics = task.metrics(outputs, labels)
    assert metrics["loss"] == metrics["error"] == metrics["mae"] == 1.0
    assert task.metrics(outputs * torch.inf, labels)["error"] is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"data.loss={HERE}:missing", "has no 'missing'"),
        (f"data.loss={HERE}:of_each", r"outputs \(2, 2\) and labels \(2,\) it returns a tensor of shape \(2,\)"),
        (f"data.loss={HERE}:apart", "without gradient; it must return one number"),
        # It was trained without learning anything.
        (f"data.loss={HERE}:constant", "constant': does not depend on the outputs"),
        (f"data.loss={HERE}:Scaled", "Scaled is a class; name a function .* as after my_scaled = Scaled"),
        # On one rank it was used, and its scale never changed.
        (f"data.loss={HERE}:scaled", r"scaled': the loss uses a trainable parameter of shape \(\) .*not update it"),
        (f"data.loss={HERE}:fails", "fails for outputs .* ValueError: of course"),
        (f"validation.metrics=[{HERE}:two_numbers]", "returns a tuple; it must return one number"),
        (f"validation.metrics=[{HERE}:accuracy]", "accuracy is the name of another metric"),
        # It was accepted, and the checkpoint with the lowest value was the best.
        (f"validation.metrics=[{HERE}:brier]", "brier is the name of another metric"),
        ("validation.metric=mae", "allowed for task multiclass: .*loss, furthest"),
        ("data.class_weights=balanced", "a loss of your own weights the classes itself"),
        ("data.loss=spread", "allowed for task multiclass: cross_entropy, or package.module:function"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(tmp_path: Path, store: Path, override: str, message: str) -> None:
    overrides = [override, *(["validation.metric=auroc"] if "metrics" in override else [])]
    with pytest.raises(RequestError, match=message):
        prepare(load_config(config_of(tmp_path, store), overrides))


def test_a_metric_may_compute_with_a_network() -> None:
    """Nothing trains it, as nothing trains a metric."""
    check_own("", [f"{HERE}:scaled"], 2, torch.tensor([0, 1]), torch.tensor([0, 1]))


def test_a_loss_of_one_slide_alone_is_refused(tmp_path: Path, store: Path) -> None:
    """Batches of one slide gave one number, and the loss of a validation was undefined without a word."""
    config = load_config(config_of(tmp_path, store), [f"data.loss={HERE}:squeezed", "data.batch_size=1"])
    with pytest.raises(RequestError, match=r"squeezed': returns a tensor of shape \(4,\) without gradient"):
        prepare(config)
