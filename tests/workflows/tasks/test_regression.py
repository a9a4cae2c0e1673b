"""Regression from the YAML to the page: values, intervals, metrics, and the same on any plan."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn import metrics as reference

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from tests.workflows.archive import SPLITS, make_config
from tests.workflows.runs import REPLICAS, STAGES, assert_plans_agree, run_here
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.tasks.number_metrics import number_metrics
from workflows.tasks.regression import Regression
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
TASK = Regression(("age",), 50.0, 10.0)


def ages(folder: Path) -> Path:
    """Values that a slide's dots show: about 40 with few, about 70 with many."""
    path = folder / "ages.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "age", "same", "split"))
        rows.writerows((f"slide-{k:02d}", 40 + 30 * (k % 2) + k / 10, 1, split) for k, split in enumerate(SPLITS))
    return path


def config_of(folder: Path, store: Path, steps: int) -> Path:
    data = {"labels": str(ages(folder)), "target": "age", "task": "regression", "class_weights": "none"}
    optimizer = {"name": "adamw", "lr": 0.01}
    run = {"steps": steps, "precision": "float64"}
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    return make_config(folder, store, data={**data, "augment": False}, model=model, optimizer=optimizer, run=run)


def test_a_number_is_learnt_and_validated(tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(config_of(tmp_path, store, 72), "validation.every_steps=36") == 0
    assert "age (mean 55" in capfd.readouterr().out
    best = tmp_path / "run/checkpoints/best"
    model = read_model_json(best)
    assert (model["task"], model["class_names"], model["model"]["classes"]) == ("regression", ["age"], 1)
    (last,) = [one for one in read_metrics(tmp_path / "run/metrics.jsonl") if one["step"] == 72 and "mae" in one]
    assert last["mae"] < 5 and last["r2"] > 0.9 and set(last["intervals"]) == {"loss", "mae", "rmse", "r2", "spearman"}
    request = validate.EvaluationRequest(best, store, tmp_path / "ages.csv", split="val", out=tmp_path / "page")
    assert validate.run(request) == 0
    rows = list(csv.DictReader((tmp_path / "page/predictions.csv").open()))
    assert [float(row["value"]) == pytest.approx(float(row["prediction"]), rel=1e-3) for row in rows] == [True] * 4
    assert rows[0]["value_low"] == "" and "Predicted and true" in (tmp_path / "page/index.html").read_text()
    request = validate.EvaluationRequest(
        best, store, tmp_path / "ages.csv", split="val", out=tmp_path / "same", target="same"
    )
    assert validate.run(request) == 0
    metrics = json.loads((tmp_path / "same/metrics.json").read_text())
    assert metrics["r2"] is metrics["spearman"] is None and metrics["mae"] > 1


def test_losses_are_those_of_one_process(tmp_path: Path, store: Path) -> None:
    assert_plans_agree(config_of(tmp_path, store, 3), [STAGES, REPLICAS])


def test_metrics_are_those_of_other_libraries_on_draws() -> None:
    rng = np.random.default_rng(4)
    true = rng.integers(0, 9, 40).astype(float)
    predicted = np.round(true + rng.normal(0, 3, 40))
    counts = rng.multinomial(40, np.full(40, 1 / 40), size=3)
    drawn = number_metrics(*map(torch.from_numpy, (predicted, true, counts.astype(float))))
    for k, row in enumerate(counts):
        y, p = np.repeat(true, row), np.repeat(predicted, row)
        assert float(drawn["mae"][k]) == pytest.approx(reference.mean_absolute_error(y, p))
        assert float(drawn["rmse"][k]) == pytest.approx(reference.root_mean_squared_error(y, p))
        assert float(drawn["r2"][k]) == pytest.approx(reference.r2_score(y, p))
        assert float(drawn["spearman"][k]) == pytest.approx(scipy.stats.spearmanr(y, p).statistic)


def test_conformal_intervals_contain_what_they_promise() -> None:
    rng, inside = torch.Generator().manual_seed(5), []
    for _ in range(400):
        noise = torch.randn(21, 1, dtype=torch.float64, generator=rng)
        of_case = torch.arange(20)
        fitted = TASK.calibration(noise[:20], torch.full((20,), 50.0, dtype=torch.float64), of_case)
        assert fitted is not None
        inside.append(abs(float(noise[20])) * 10 <= fitted["half_width"])
    assert 0.87 < np.mean(inside) < 0.95  # 19 / 21 = 0.905
    assert TASK.calibration(torch.zeros(8, 1), torch.zeros(8), torch.arange(8)) is None


def test_a_case_counts_with_its_largest_residual() -> None:
    outputs = torch.zeros(10, 1, dtype=torch.float64)
    targets = 50 + torch.arange(10, dtype=torch.float64)
    of_case = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 8])
    assert TASK.calibration(outputs, targets, of_case) == {"half_width": 9.0, "level": 0.9, "cases": 9}


def test_outputs_are_read_in_the_units_of_the_target() -> None:
    readout = TASK.readout({"half_width": 4.0})
    values = readout.values(np.array([1.5]))
    assert values.tolist() == [65.0, 61.0, 69.0] and readout.columns == ("value", "value_low", "value_high")
    assert (readout.prediction(values), readout.verdict(values)) == ("65", "61 to 69")
    assert readout.position_scores(torch.zeros(1, 2, 3)).tolist() == [[[0.5] * 3] * 2]
    unknown = TASK.readout(None).values(np.array([0.0]))
    assert unknown[0] == 50 and np.isnan(unknown[1:]).all() and TASK.readout(None).verdict(unknown) == ""
    assert TASK.of_json({"target": "age", **TASK.to_json()}) == TASK


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.target=[age, split]", "task regression needs 1 column"),
        ("data.target=split", "'train' .line 2.* the first is not a number"),
        ("data.target=same", "'same' is 1 for all 6 training slides: there is nothing to learn"),
        ("data.loss=cox", "allowed for task regression: huber, mse"),
        ("validation.metric=auroc", "allowed for task regression: mae, rmse"),
        ("data.class_weights=balanced", "no classes to balance"),
        ("model.classes=3", "task regression has no classes"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, store: Path, override: str, message: str) -> None:
    from workflows.training.job import prepare

    with pytest.raises(RequestError, match=message):
        prepare(load_config(config_of(tmp_path, store, 1), [override]))


@pytest.mark.parametrize("slides", range(1, 12))
def test_equal_numbers_are_refused_whatever_their_deviation_rounds_to(slides: int) -> None:
    """`std` of three times 0.7 is 1e-16, by which labels would be divided."""
    config = SimpleNamespace(columns=("age",), named_loss="huber")
    labels = SimpleNamespace(target="age")
    with pytest.raises(RequestError, match=f"is 0.7 for all {slides} training slides"):
        Regression.fitted(config, labels, [(0.7,)] * slides)  # type: ignore[arg-type]


@pytest.mark.parametrize("cases", [8, 9])
def test_a_warning_says_whether_there_will_be_intervals(cases: int) -> None:
    """1 / (1 − 0.9) is a little above 10: nine cases were said to be too few, and had an interval."""
    values = [(50.0 + k,) for k in range(cases)]
    outputs = torch.zeros(cases, 1, dtype=torch.float64)
    fitted = TASK.calibration(outputs, TASK.tensor(values), torch.arange(cases))
    warnings = TASK.warnings(values, values)
    assert (fitted is None) == (cases == 8) == any("get no interval, which needs 9 cases" in text for text in warnings)
