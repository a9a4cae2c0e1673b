"""A task of the user's own: a class by name, which trains, validates and predicts, or is refused with what it lacks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from tests.workflows.archive import SPLITS, make_config
from tests.workflows.runs import run_here
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.config.tasks import TaskFacts
from workflows.tasks.bootstrap import draw_cases
from workflows.tasks.multiclass import Multiclass
from workflows.tasks.regression import Regression
from workflows.tasks.several.part import parts_of
from workflows.tasks.several.task import Several
from workflows.tasks.task import Task, loss_over
from workflows.training.job import prepare

pytestmark = pytest.mark.usefixtures("in_process")
HERE = "tests.workflows.tasks.test_own_task"
_METRICS = ("mae", "rmse", "r2", "spearman")


class Counts(Regression):
    """Counts, whose squared errors are relative to their variance."""

    facts: ClassVar[TaskFacts] = TaskFacts("counts", "each slide has a count", ("scaled_squares",), _METRICS, _METRICS)

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values = self.in_units(outputs)[:, 0]
        return (values - targets.to(values.dtype)) ** 2 / (targets + 1).to(values.dtype)


class Focal(Multiclass):
    """Classes by another loss, of which the metrics of `Multiclass` know nothing."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hit = outputs.softmax(1).gather(1, targets[:, None])
        return (-((1 - hit) ** 2) * hit.log()).mean()


class Stated(Focal):
    """It says that its loss is a mean over slides."""

    loss_over = "microbatch"  # type: ignore[assignment]


class Squares(Multiclass):
    """Classes by another loss of each slide."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.softmax(1).gather(1, targets[:, None])[:, 0] - 1) ** 2


class NoFacts(Task):
    """Nothing."""


class NoTensor(Counts):
    """Its loss has a row for each slide."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0]


def function() -> None:
    """No class."""


def config_of(folder: Path, store: Path, task: str) -> Path:
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "dots", "split"))
        rows.writerows((f"slide-{k:02d}", (4, 60)[k % 2] + k, split) for k, split in enumerate(SPLITS))
    data = {"labels": str(folder / "labels.csv"), "target": "dots", "task": task, "class_weights": "none"}
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    return make_config(folder, store, data=data, model=model, run={"steps": 1}, validation={"every_steps": 1})


def test_a_task_of_ones_own_is_trained_and_validated(tmp_path: Path, store: Path) -> None:
    assert run_here(config_of(tmp_path, store, f"{HERE}:Counts"), "data.augment=false") == 0
    best = tmp_path / "run/checkpoints/best"
    assert read_model_json(best)["task"] == f"{HERE}:Counts"
    request = validate.EvaluationRequest(best, store, tmp_path / "labels.csv", out=tmp_path / "page")
    assert validate.run(request) == 0
    rows = list(csv.DictReader((tmp_path / "page/predictions.csv").open(encoding="utf-8-sig")))
    losses = [(float(row["value"]) - float(row["label"])) ** 2 / (float(row["label"]) + 1) for row in rows]
    stated = json.loads((tmp_path / "page/metrics.json").read_text())
    assert len(rows) == 2 and stated["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_a_loss_that_a_class_changes_is_the_one_that_validation_reports() -> None:
    outputs, targets = torch.randn(8, 2, dtype=torch.float64), torch.arange(8) % 2
    counts = draw_cases(8, 20)
    focal = Focal(("grade",), ("low", "high"), (1.0, 1.0))
    assert focal.metrics(outputs, targets)["loss"] == pytest.approx(float(focal.loss(outputs, targets)), rel=1e-12)
    assert "loss" in focal.own_names and focal.metrics(outputs * torch.nan, targets)["loss"] is None
    squares = Squares(("grade",), ("low", "high"), (1.0, 1.0))
    of_each = squares.losses(outputs, targets)
    assert squares.metrics(outputs, targets)["loss"] == pytest.approx(float(of_each.mean()), rel=1e-12)
    assert squares.intervals(outputs, targets, counts)["loss"] is not None and not squares.loss_is_own
    kinds = [Multiclass, Focal, Stated, Squares]
    assert [loss_over(kind(("grade",))) for kind in kinds] == ["microbatch", "batch", "microbatch", "microbatch"]
    both = Several(("grade", "other"), parts_of([("a", focal, 1.0, 1.0), ("b", squares, 2.0, 1.0)]))
    pair, labels = torch.cat([outputs, outputs], 1), torch.stack([targets, targets], 1).double()
    values = both.metrics(pair, labels)
    assert values["a.loss"] == pytest.approx(float(focal.loss(outputs, targets)))
    assert values["loss"] == pytest.approx(float(both.loss(pair, labels)))
    assert both.intervals(pair, labels, counts)["a.loss"] is None and both.loss_over == "batch"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("Counted", "has no 'Counted'"),
        ("function", "has no facts"),
        ("NoFacts", "has no facts"),
        ("NoTensor", "loss must return a scalar tensor"),
    ],
)
def test_what_is_no_task_is_refused_with_what_it_lacks(tmp_path: Path, store: Path, task: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        prepare(load_config(config_of(tmp_path, store, f"{HERE}:{task}")))


def test_a_misspelt_task_is_answered(tmp_path: Path, store: Path) -> None:
    with pytest.raises(RequestError, match="did you mean regression"):
        load_config(config_of(tmp_path, store, "regresion"))
