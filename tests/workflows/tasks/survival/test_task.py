"""Survival from the YAML to the page: risk groups, baseline, metrics, and the same on any plan."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hyfi_core.errors import RequestError
from hyfi_core.runtime.checkpoint import read_model_json
from tests.workflows.archive import SPLITS, make_config
from tests.workflows.runs import PARTS, REPLICAS, STAGES, assert_plans_agree, run_here
from workflows.commands import validate
from workflows.config.load import load_config
from workflows.tasks.survival.task import Survival
from workflows.training.job import prepare
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("in_process")
COX = Survival(("months", "died"), "cox", (10.0, 20.0), (), 8, 4)
HAZARDS = Survival(("months", "died"), "hazards", (10.0, 20.0), (10.0, 30.0), 8, 4)
CALIBRATION = {"cutoff": 0.5, "centre": 1.0, "spread": 2.0, "baseline": [0.1, 0.4]}


def times(folder: Path) -> Path:
    """Slides with many dots live about 10 months, others 40; every fifth is censored."""
    path = folder / "times.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("slide_id", "months", "died", "same", "left", "split"))
        for k, split in enumerate(SPLITS):
            died = "alive" if k % 5 == 0 else "dead"
            rows.writerow((f"slide-{k:02d}", 40 - 30 * (k % 2) + k / 2, died, 2, "alive", split))
    return path


def config_of(folder: Path, store: Path, steps: int, loss: str = "cox") -> Path:
    data = {"labels": str(times(folder)), "target": ["months", "died"], "task": "survival", "loss": loss}
    data |= {"class_weights": "none", "augment": False, "batch_size": 6 if loss == "cox" else 2}
    model = {"name": "resnet6", "norm": "group", "options": {"width": 4}}
    optimizer = {"name": "adamw", "lr": 0.01}
    run = {"steps": steps, "precision": "float64"}
    return make_config(folder, store, data=data, model=model, optimizer=optimizer, run=run)


@pytest.mark.parametrize("loss", ["cox", "hazards"])
def test_risks_are_learnt_and_validated(tmp_path: Path, store: Path, loss: str) -> None:
    assert run_here(config_of(tmp_path, store, 12 if loss == "cox" else 36, loss), "validation.every_steps=12") == 0
    best = tmp_path / "run/checkpoints/best"
    model = read_model_json(best)
    assert model["model"]["classes"] == len(model["class_names"]) == (1 if loss == "cox" else 4)
    last = [one for one in read_metrics(tmp_path / "run/metrics.jsonl") if one["kind"] == "validation"][-1]
    assert last["concordance"] >= 2 / 3 and last["time_auroc"] == 1  # slides alike in dots cannot be told apart
    assert ("brier" in last) == (loss == "hazards")
    request = validate.EvaluationRequest(best, store, tmp_path / "times.csv", split="all", out=tmp_path / "page")
    assert validate.run(request) == 0
    rows = list(csv.DictReader((tmp_path / "page/predictions.csv").open()))
    assert [row["prediction"] for row in rows] == ["low risk", "high risk"] * 6
    assert rows[0]["label"] == "40 (censored)" and float(rows[0]["survival_41"]) > float(rows[1]["survival_41"])
    page = (tmp_path / "page/index.html").read_text()
    assert "Kaplan–Meier by predicted risk" in page and "low risk (6)" in page and "AUROC over time" in page
    for target in ("months,left", "same,died", "same,left"):  # labels of a test set may be alike
        request = replace(request, target=target, out=tmp_path / target)
        assert validate.run(request) == 0
        metrics = json.loads((tmp_path / target / "metrics.json").read_text())
        assert (metrics["concordance"] is None) == (target != "same,died")


@pytest.mark.parametrize(
    ("loss", "plans"), [("cox", [PARTS, ("grids=[[1, 1], [1, 1]]", "microbatches=3"), REPLICAS]), ("hazards", [STAGES])]
)
def test_losses_are_those_of_one_process(tmp_path: Path, store: Path, loss: str, plans: list[tuple[str, ...]]) -> None:
    assert_plans_agree(config_of(tmp_path, store, 3, loss), plans)


def test_outputs_are_read_as_risk_and_survival() -> None:
    readout = COX.readout(CALIBRATION)
    assert readout.columns == ("risk", "survival_10", "survival_20") and readout.channels == ("risk",)
    values = readout.values(np.array([1.0]))
    assert values.tolist() == pytest.approx([0, np.exp(-0.1), np.exp(-0.4)])
    assert (readout.prediction(values), readout.prediction(values + 1)) == ("low risk", "high risk")
    assert readout.position_scores(torch.ones(1, 1, 1)).tolist() == [[[0.5]]]
    unknown = COX.readout(None)
    assert np.isnan(unknown.values(np.array([1.0]))[1:]).all() and unknown.prediction(np.array([1.0, 0, 0])) == "1"
    hazards = HAZARDS.readout({"cutoff": 0.1}).values(np.zeros(2))
    assert hazards.tolist() == pytest.approx([1 - (0.5 + 0.5**1.5) / 2, 0.5, 0.5**1.5])
    assert HAZARDS.readout(None).channels == ("event 0 to 10", "event 10 to 30")
    assert readout.joined([readout, COX.readout({**CALIBRATION, "cutoff": 1.5})]).cutoff == 1.0
    for task in (COX, HAZARDS):
        assert task.of_json({"target": ["months", "died"], **task.to_json()}) == task


def test_labels_as_text() -> None:
    assert COX.text((12.5, 1.0)) == "12.5 (event)"
    for text, target in (("12.5 (event)", (12.5, 1.0)), ("3;alive", (3.0, 0.0)), ("3 (censored)", (3.0, 0.0))):
        assert COX.target_of(text) == target
    assert [COX.target_of(text) for text in ("", ";", "NA;1", "3;", "3;maybe", "-3;1", "3")] == [None] * 7


def test_cases_are_compared_by_their_mean_risk() -> None:
    outputs = torch.tensor([[1.0], [3.0], [5.0]], dtype=torch.float64)
    targets = COX.tensor([(4.0, 0.0), (6.0, 1.0), (2.0, 1.0)])
    mean = COX.by_case(outputs, targets, torch.tensor([0, 0, 1]), "mean")
    assert mean[0].tolist() == [[2.0], [5.0]] and mean[1].tolist() == [[6.0, 1.0], [2.0, 1.0]]
    assert COX.by_case(outputs, targets, torch.tensor([0, 0, 1]), "max")[0].tolist() == [[3.0], [5.0]]
    fitted = COX.calibration(outputs, targets, torch.tensor([0, 0, 1]))
    assert fitted is not None and (fitted["cutoff"], fitted["centre"], fitted["cases"]) == (0.5, 3.0, 2)


def test_batches_without_events_are_said_before_the_run() -> None:
    COX.check_batch(2)  # 4 events of 8: 21 % of such batches have none
    HAZARDS.check_batch(1)
    with pytest.raises(RequestError, match=r"batch_size: given 1; .*compares nothing; use 4 or more"):
        COX.check_batch(1)
    rare = Survival(("months", "died"), "cox", (10.0,), (), 100, 5)
    with pytest.raises(RequestError, match=r"5 events of 100 .* 81% of the batches have no event; use 45 or more"):
        rare.check_batch(4)
    assert COX.batch_warnings(4) == [] and HAZARDS.batch_warnings(1) == []
    assert "21% of the batches have no event" in COX.batch_warnings(2)[0]


def test_validation_without_events_is_refused() -> None:
    COX.check_validation([])
    COX.check_validation([(3.0, 0.0), (2.0, 1.0)])
    HAZARDS.check_validation([(3.0, 0.0)])
    with pytest.raises(RequestError, match=r"none of 1 validation slides has an event .*data.loss=hazards"):
        COX.check_validation([(3.0, 0.0)])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.target=months", "task survival needs 2 columns"),
        ("data.target=[died, months]", r"months: '40.0' .line 2.*data.target is \[time, event\], in this order"),
        ("data.target=[months, left]", "none of 6 training slides has an event .*nothing to learn"),
        ("data.target=[same, died]", "all 6 training slides have the time 2: there is nothing to learn"),
        ("data.target=[months, split]", "split: 'train' .line 2.*write 1 for an event"),
        ("data.loss=huber", "allowed for task survival: cox, hazards"),
        ("data.time_bins=3", "only task survival with loss hazards"),
        ("validation.metric=auroc", "allowed for task survival: concordance"),
        ("data.batch_size=1", "compares nothing"),
        ("data.sampling=balanced", "no classes to balance"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, store: Path, override: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepare(load_config(config_of(tmp_path, store, 1), [override]))


def test_another_target_has_as_many_columns() -> None:
    assert COX.with_target("days, dead").columns == ("days", "dead")
    with pytest.raises(RequestError, match="--target days: the model has 2 columns: months,died"):
        COX.with_target("days")


def test_the_latest_event_is_in_the_last_interval_and_texts_keep_times() -> None:
    """Edges of twelve digits lay below it: of an event after the last edge, no interval knows."""
    config = SimpleNamespace(columns=("months", "died"), named_loss="hazards", time_bins=4)
    days = (100, 200, 411, 55, 300, 377, 250, 150)
    train = [(number / 30.4375, 1.0) for number in days]
    task = Survival.fitted(config, SimpleNamespace(target="died"), train)  # type: ignore[arg-type]
    latest = max(train)
    assert task.edges[-1] == latest[0] and set(task.times) | set(task.edges) <= {time for time, _ in train}
    sure = torch.tensor([[0.0, 0.0, 0.0, 9.0]], dtype=torch.float64)  # that it ends in the last interval
    assert float(task.loss(sure, task.tensor([latest]))) == pytest.approx(3 * np.log(2), abs=1e-3)
    assert [task.target_of(task.text(target)) for target in train] == train
    assert task.text((12.0, 1.0)) == "12 (event)"
