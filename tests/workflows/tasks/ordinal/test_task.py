"""Grades from the YAML to the page: their order, their median, metrics, and the same on any plan."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from pathology.predict.colors import NO_CHANNEL
from tests.workflows.archive import SPLITS, make_config, make_store
from tests.workflows.runs import REPLICAS, STAGES, assert_plans_agree, run_here
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.tasks.ordinal.corn import (
    above,
    corn_losses,
    grade_metrics,
    outputs_of,
    predicted_grades,
)
from workflows.tasks.ordinal.links import LINKS, GradeLink
from workflows.tasks.ordinal.task import Ordinal
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
GRADES = ("G1", "G2", "G3")
LEARNS = (
    "run.precision=float32",
    "data.batch_size=6",
    "optimizer.lr=0.02",
    "lr_schedule.name=constant",
    "validation.every_steps=20",
)
TASK = Ordinal(("grade",), GRADES, (1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides with few, more and many dots."""
    return make_store(tmp_path_factory.mktemp("archive"), dots=(2, 40, 200) * 4)


def config_of(folder: Path, store: Path, steps: int) -> Path:
    path = folder / "labels.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "grade", "word", "split"))
        words = ("mild", "some", "severe")
        rows.writerows((f"slide-{k:02d}", GRADES[k % 3], words[k % 3], split) for k, split in enumerate(SPLITS))
    data = {"labels": str(path), "target": "grade", "task": "ordinal", "augment": False}
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    run = {"steps": steps, "precision": "float64"}
    return make_config(folder, store, data=data, model=model, optimizer={"name": "adamw", "lr": 0.01}, run=run)


def test_grades_are_learnt_and_validated(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(config_of(tmp_path, store, 40), *LEARNS) == 0
    assert "grades G1 < G2 < G3" in capfd.readouterr().out
    best = tmp_path / "run/checkpoints/best"
    model = read_model_json(best)
    assert (model["task"], model["class_names"], model["model"]["classes"]) == ("ordinal", list(GRADES), 2)
    last = [one for one in read_metrics(tmp_path / "run/metrics.jsonl") if one["kind"] == "validation"][-1]
    assert (last["quadratic_kappa"], last["mae"]) == (1, 0)
    request = validate.EvaluationRequest(best, store, tmp_path / "labels.csv", split="all", out=tmp_path / "page")
    assert validate.run(request) == 0
    rows = list(csv.DictReader((tmp_path / "page/predictions.csv").open()))
    assert [row["prediction"] for row in rows] == [*GRADES] * 4
    assert sum(float(rows[0][f"p_{grade}"]) for grade in GRADES) == pytest.approx(1, abs=1e-5)
    page = (tmp_path / "page/index.html").read_text()
    assert "off by at most one" in page and "above G2" in page


def test_losses_are_those_of_one_process(tmp_path: Path, store: Path) -> None:
    overrides = ["data.target=word", "model.classes=[mild, some, severe]"]
    assert_plans_agree(config_of(tmp_path, store, 3), [STAGES, REPLICAS], *overrides)


@given(st.lists(st.floats(-30, 30), min_size=3, max_size=3))
def test_probabilities_are_consistent_and_the_loss_is_their_likelihood(values: list[float]) -> None:
    outputs = torch.tensor([values], dtype=torch.float64)
    probabilities = LINKS["corn"].probabilities(outputs)
    assert bool((probabilities >= 0).all()) and float(probabilities.sum()) == pytest.approx(1)
    assert bool((above(outputs).diff() <= 0).all())
    for grade in range(4):
        loss = float(corn_losses(outputs, torch.tensor([grade])))
        assert np.exp(-loss) == pytest.approx(float(probabilities[0, grade]), abs=1e-12)
    assert torch.allclose(above(outputs_of(above(outputs))), above(outputs), atol=1e-9)


def test_metrics_are_those_of_scikit_learn_on_draws() -> None:
    rng = np.random.default_rng(3)
    true = rng.integers(0, 4, 40)
    predicted = np.clip(true + rng.integers(-1, 2, 40), 0, 3)
    counts = rng.multinomial(40, np.full(40, 1 / 40), size=3)
    drawn = grade_metrics(torch.from_numpy(predicted), torch.from_numpy(true), 4, torch.from_numpy(counts).double())
    for k, row in enumerate(counts):
        y, p = np.repeat(true, row), np.repeat(predicted, row)
        kappa = reference.cohen_kappa_score(y, p, weights="quadratic", labels=range(4))
        assert float(drawn["quadratic_kappa"][k]) == pytest.approx(kappa)
        assert float(drawn["mae"][k]) == pytest.approx(reference.mean_absolute_error(y, p))
        assert float(drawn["accuracy"][k]) == pytest.approx(reference.accuracy_score(y, p))
        assert float(drawn["balanced_accuracy"][k]) == pytest.approx(reference.balanced_accuracy_score(y, p))


def test_outputs_are_read_as_the_median_grade() -> None:
    assert predicted_grades(torch.tensor([[0.4, 0.2, 0.4], [0.5, 0.1, 0.4], [0.1, 0.3, 0.6]])).tolist() == [1, 0, 2]
    readout = TASK.readout(None)
    assert readout.channels == ("above G1", "above G2") and readout.columns == ("p_G1", "p_G2", "p_G3")
    values = readout.values(np.array([np.log(3), 0.0]))  # 3/4 above G1, half of these above G2
    assert values.tolist() == pytest.approx([1 / 4, 3 / 8, 3 / 8])
    assert (readout.prediction(values), readout.channel(values), readout.verdict(values)) == (
        "G2",
        0,
        "75.0 % for G2 or higher",
    )
    assert readout.main_bar(values) == 1 and [bar.channel for bar in readout.bars(values)] == [NO_CHANNEL, 0, 1]
    scores = readout.position_scores(torch.zeros(2, 1, 1))
    assert scores.flatten().tolist() == [0.5, 0.25]
    assert TASK.of_json({"target": "grade", **TASK.to_json()}) == TASK


def test_a_case_has_the_mean_of_its_probabilities_and_the_highest_grade() -> None:
    outputs = torch.tensor([[2.0, -1.0], [-3.0, 0.5], [1.0, 1.0]], dtype=torch.float64)
    merged, grades = TASK.by_case(outputs, torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]), "mean")
    expected = LINKS["corn"].probabilities(outputs[:2]).mean(0)
    assert LINKS["corn"].probabilities(merged)[0].tolist() == pytest.approx(expected.tolist())
    assert merged[1].tolist() == [1.0, 1.0] and grades.tolist() == [2, 1]
    most, _ = TASK.by_case(outputs, torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]), "max")
    assert most[0].tolist() == [2.0, -1.0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.target=word", "the order of mild, severe, some is not known.*model.classes"),
        ("data.target=[grade, word]", "task ordinal needs 1 column"),
        ("model.classes=[G1, G2]", "unknown class 'G3'"),
        ("data.loss=cross_entropy", "allowed for task ordinal: corn"),
        ("validation.metric=auroc", "allowed for task ordinal: quadratic_kappa"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, store: Path, override: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepare(load_config(config_of(tmp_path, store, 1), [override]))


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 2.0, 8.0]))
def test_a_link_has_consistent_probabilities_and_their_likelihood(link: GradeLink, seed: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    outputs = (torch.randn(20, 3, generator=rng, dtype=torch.float64) * scale).requires_grad_()
    grades = torch.randint(0, 4, (20,), generator=rng)
    probabilities, above_k = link.probabilities(outputs), link.above(outputs)
    assert bool((above_k[:, 1:] <= above_k[:, :-1]).all()) and bool((probabilities >= 0).all())
    assert torch.allclose(probabilities.sum(1), torch.ones(20, dtype=torch.float64))
    of_grade = probabilities.gather(1, grades[:, None])[:, 0]
    losses = link.losses(outputs, grades)
    likely = of_grade > 1e-9  # of smaller ones the difference of two probabilities has no digits
    assert torch.allclose(losses[likely], -of_grade[likely].log(), rtol=1e-5)
    assert bool(losses.isfinite().all()) and bool(torch.autograd.grad(losses.sum(), outputs)[0].isfinite().all())
    assert torch.allclose(link.above(link.outputs_of(above_k)), above_k, rtol=1e-6, atol=1e-9)


def test_the_cumulative_link_is_trained_stored_and_predicted(tmp_path: Path, store: Path) -> None:
    config = config_of(tmp_path, store, 2)
    assert run_here(config, "data.loss=cumulative_link") == 0
    model = read_model_json(tmp_path / "run/checkpoints/latest")
    assert model["ordinal"] == {"loss": "cumulative_link"} and Ordinal.of_json(model).kind == "cumulative_link"
    outputs = np.array([0.5, -1.0])
    values = Ordinal.of_json(model).readout(None).values(outputs)
    assert values[0] == pytest.approx(1 - 1 / (1 + np.exp(-0.5)))
    with pytest.raises(RequestError, match="known are corn, cumulative_link"):
        Ordinal.of_json({**model, "ordinal": {"loss": "other"}})
